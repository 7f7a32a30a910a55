"""Synchronous SGD with backup workers: rounds without the slowest workers.

Servers sum up the first N - b gradients of a round and drop those that come later
(`mpips.ps.first_n`). Channels, data and checkpoints are those of `mpips.strategies.async_sgd`:
batches go to who asks, so that a slow worker takes fewer, and `--clip` is of each worker's
gradient. What is dropped counts as handled: its batch is not assigned again. The result depends
on who comes first, so that it is not the same bits each time, as it is without backup workers.

Reference: Chen et al., arXiv 1604.00981 (2016), "Revisiting Distributed Synchronous SGD".
"""

from mpips.strategies.async_sgd import run

__all__ = ["run"]
