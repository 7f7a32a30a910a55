"""Ranks, nodes, windows, messages, waiting and the end of a job; the only room with MPI."""
