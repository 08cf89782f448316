"""The queue: every statement that changes a job's state, and how jobs are submitted, claimed and renewed."""
