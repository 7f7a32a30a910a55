"""Replay of a recorded run on one rank, with bitwise equal results."""
