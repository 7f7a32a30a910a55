"""Plan of a job before its first step: roles, memory, traffic, simulation."""
