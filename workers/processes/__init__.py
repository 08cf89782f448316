"""The only code that starts the processes of jobs, and ends them. Linux only."""
