"""The agent of a host: claims jobs, runs their units, renews the claims and records the results."""
