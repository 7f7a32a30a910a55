"""Stale synchronous parallel: asynchronous SGD in which no worker runs far ahead.

At clock c a worker reads parameters that include every update of clock c - s - 1 and before, and
all of its own; it may include later ones. Clocks are those of the batches as they are assigned,
W to a clock (`mpips.ps.consistency`). Who is more than s clocks ahead of the slowest waits. With
s = 0 no batch of a clock is begun before all of the clock before are applied, as in
bulk-synchronous SGD.
Every read is checked by the clocks that it came with, and the summary gives the largest distance.

Servers, channels, data and checkpoints are those of `mpips.strategies.async_sgd`. Clocks begin
anew in a resumed run, for all workers alike.

Reference: Ho et al., NeurIPS 2013, "More Effective Distributed ML via a Stale Synchronous
Parallel Parameter Server".
"""

from mpips.strategies.async_sgd import run

__all__ = ["run"]
