"""Simulation of a job: jitter, slow workers, queues and failures."""
