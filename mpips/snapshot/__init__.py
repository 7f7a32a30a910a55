"""Consistent snapshot of a running job, and its commit as a checkpoint."""
