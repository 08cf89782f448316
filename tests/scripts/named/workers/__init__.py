NAME = "workers of the project"
