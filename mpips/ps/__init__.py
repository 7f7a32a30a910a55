"""Asynchronous training: pull, push, the loops of servers and workers."""
