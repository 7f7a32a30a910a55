"""Synchronous torch over gloo: all_reduce and SGD on a vector, or DistributedDataParallel."""

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
    make_parser,
    mlp_bytes,
    parse,
    report,
    seconds_of,
    time_repeats,
)

SAMPLES = 8192


def make_round(given: argparse.Namespace) -> Callable[[], None]:
    """Return a round: sum the gradients of all ranks, update, and make the next gradient."""
    import torch
    from torch import distributed

    grad, params = torch.ones(given.size), torch.zeros(given.size)

    def step() -> None:
        distributed.all_reduce(grad)
        params.sub_(grad, alpha=1e-3)
        grad.fill_(1)

    return step


def make_mlp(given: argparse.Namespace) -> Callable[[], None]:
    """Return a training step of the MLP on a random batch."""
    import torch
    from torch import nn

    layers = (nn.Linear(784, given.hidden), nn.ReLU(), nn.Linear(given.hidden, given.hidden))
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(*layers, nn.ReLU(), nn.Linear(given.hidden, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.rand(SAMPLES, 784), torch.randint(0, 10, (SAMPLES,))

    def step() -> None:
        batch = torch.randint(0, SAMPLES, (given.batch,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()

    return step


MAKE = {"round": make_round, "mlp": make_mlp}


def work(send: Send, rank: int, given: argparse.Namespace, rendezvous: Path, barrier: Any) -> None:
    """Make the steps of one rank; send the version, and begin and end of each repeat."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    world = {"rank": rank, "world_size": given.workers}
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", **world)
    step = MAKE[given.measure](given)

    def steps() -> None:
        for _ in range(given.steps):
            step()

    spans = time_repeats(given.repeats, barrier, steps)
    distributed.destroy_process_group()
    send((torch.__version__, spans))


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
        versions, spans = zip(*children.results(), strict=True)
    size = 4 * given.size if given.measure == "round" else mlp_bytes(given.hidden)
    report("torch-ddp", versions[0], given, size, seconds_of(spans))


if __name__ == "__main__":
    main()
