"""Ranks, nodes, windows, messages, waiting and abort: the only room with MPI."""
