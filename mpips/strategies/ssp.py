"""Stale synchronous parallel (SSP): asynchronous SGD with a staleness bound.

One clock is W assigned batches, where W is the number of workers (`mpips.ps.consistency`). At clock
c, a worker reads parameters that contain all updates of clocks up to c - s - 1, and all of its own.
They may contain later updates, too. A worker that is more than s clocks ahead of the slowest one
waits. With s = 0, all batches of a clock are applied before a batch of the next clock starts, as in
bulk-synchronous SGD. Every read is checked by the clocks of the shards that it contains. The
summary has the largest distance.

Servers, channels, data and checkpoints are those of `mpips.strategies.async_sgd`. In a resumed run,
all clocks start at 0.

Reference: Ho et al., NeurIPS 2013, "More Effective Distributed ML via a Stale Synchronous
Parallel Parameter Server".
"""

from mpips.strategies.async_sgd import run

__all__ = ["run"]
