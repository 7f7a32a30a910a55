"""The job before its first step: roles, memory, traffic, simulation."""
