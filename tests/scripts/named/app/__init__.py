NAME = "app of the project"
