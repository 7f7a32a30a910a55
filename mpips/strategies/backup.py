"""Synchronous SGD with backup workers: rounds without the slowest workers.

With N workers and b backup workers, servers sum the first N - b gradients of a round, and drop the
later ones (`mpips.ps.first_n`). Channels, data and checkpoints are those of
`mpips.strategies.async_sgd`. Batches are assigned on request, so a slow worker gets fewer.
``--clip`` clips each worker's gradient. A dropped gradient counts as handled: its batch is not
assigned again. The result depends on the order of arrival; so unlike mode sync, it does not have
the same bits in every run.

Reference: Chen et al., arXiv 1604.00981 (2016), "Revisiting Distributed Synchronous SGD".
"""

from mpips.strategies.async_sgd import run

__all__ = ["run"]
