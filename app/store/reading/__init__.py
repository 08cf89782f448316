"""Reads jobs, measurements and sweeps. Changes nothing."""
