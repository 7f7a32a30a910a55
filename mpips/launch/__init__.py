"""Supervisor of ranks, job scripts, and the terminal of a run."""
