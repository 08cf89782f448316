"""Jobs on a Slurm cluster: the worker that submits them, and the agent that runs one job in its allocation."""
