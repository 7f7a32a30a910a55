"""Replay of an asynchronous run on one rank, to the same bits."""
