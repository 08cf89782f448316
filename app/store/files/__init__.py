"""The files beside the database: artifacts of jobs and uploaded code."""
