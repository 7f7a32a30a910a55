"""Synchronous torch over gloo: all_reduce and SGD on a vector, or DistributedDataParallel.

The measure `memory` is the proportional set size of all ranks after a step of Adam.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from script import (  # type: ignore[import-not-found]
    Children,
    Send,
    add_mlp,
    add_size,
    layers_of,
    make_parser,
    mlp_bytes,
    parse,
    pss_mb,
    report,
    seconds_of,
    time_repeats,
)

SAMPLES = 8192
SMALL_BATCH = 4


def make_round(
    given: argparse.Namespace, reduce: Callable[[Any], Any] | None = None
) -> Callable[[], None]:
    """Return a round, which sums the ranks' gradients, updates, and computes the next gradient."""
    import torch
    from torch import distributed

    grad, params = torch.ones(given.size), torch.zeros(given.size)
    reduce = reduce or distributed.all_reduce

    def step() -> None:
        reduce(grad)
        params.sub_(grad, alpha=1e-3)
        grad.fill_(1)

    return step


def make_model(given: argparse.Namespace) -> Any:
    """Return the MLP in DistributedDataParallel."""
    from torch import nn

    layers = (nn.Linear(784, given.hidden), nn.ReLU(), nn.Linear(given.hidden, given.hidden))
    return nn.parallel.DistributedDataParallel(
        nn.Sequential(*layers, nn.ReLU(), nn.Linear(given.hidden, 10))
    )


def mlp_step(given: argparse.Namespace, model: Any) -> Callable[[], None]:
    """Return a training step of the MLP on a random batch."""
    import torch
    from torch import nn

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.rand(SAMPLES, 784), torch.randint(0, 10, (SAMPLES,))

    def step() -> None:
        batch = torch.randint(0, SAMPLES, (given.batch,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()

    return step


def make_mlp(given: argparse.Namespace) -> Callable[[], None]:
    """Return a training step of the MLP, with DDP's own all-reduce."""
    return mlp_step(given, make_model(given))


def make_large(given: argparse.Namespace) -> Callable[[], None]:
    """Return a training step of a model of about `size` parameters, by Adam."""
    import torch
    from torch import nn

    width, depth = layers_of(given.size)
    hidden = (layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU()))
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*hidden, nn.Linear(width, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    x, y = torch.rand(SMALL_BATCH, width), torch.randint(0, 10, (SMALL_BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


MAKE = {"round": make_round, "mlp": make_mlp, "memory": make_large}


def start(rank: int, workers: int, rendezvous: Path) -> Any:
    """Join the group of all ranks by gloo, with one thread; returns ``torch.distributed``."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    world = {"rank": rank, "world_size": workers}
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", **world)
    return distributed


def work(send: Send, rank: int, given: argparse.Namespace, rendezvous: Path, barrier: Any) -> None:
    """Make the steps of one rank; send version, memory, and begin and end of each repeat."""
    distributed = start(rank, given.workers, rendezvous)
    import torch

    step = MAKE[given.measure](given)

    def steps() -> None:
        for _ in range(given.steps):
            step()

    spans = time_repeats(given.repeats, barrier, steps)
    used_mb = pss_mb()
    barrier.wait()  # all ranks live while their shared memory is measured
    distributed.destroy_process_group()
    send((torch.__version__, used_mb, spans))


def main() -> None:
    """Run the ranks, and print the measurement."""
    parser = make_parser(__doc__, list(MAKE))
    add_size(parser)
    add_mlp(parser)
    given = parse(parser)
    with tempfile.TemporaryDirectory() as folder, Children() as children:
        rendezvous = Path(folder, "rendezvous")
        barrier = children.barrier(given.workers)
        for rank in range(given.workers):
            children.start(work, rank, given, rendezvous, barrier)
        versions, used_mb, spans = zip(*children.results(), strict=True)
    size = mlp_bytes(given.hidden) if given.measure == "mlp" else 4 * given.size
    found = seconds_of(spans), sum(used_mb) if given.measure == "memory" else 0.0
    report("torch-ddp", versions[0], given, size, *found)


if __name__ == "__main__":
    main()
