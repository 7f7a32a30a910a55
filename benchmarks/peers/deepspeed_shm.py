"""DeepSpeed's all-reduce in shared memory: with SGD on a vector, or as the hook of DDP.

The first load compiles the operator, which needs a compiler and ``ninja``. The ranks connect by
gloo, as in `torch_ddp.py`.
"""

import argparse
import contextlib
import os
import sys
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
from torch_ddp import (  # type: ignore[import-not-found]
    make_model,
    make_round,
    mlp_step,
    start,
)

SEGMENTS = Path("/dev/shm")


def load() -> Any:
    """Compile the operator, or load it from the cache, into ``torch.ops.deepspeed``."""
    with contextlib.redirect_stdout(sys.stderr):
        from deepspeed.ops.op_builder.cpu.comm import (  # type: ignore[import-not-found]
            ShareMemCommBuilder,
        )

        return ShareMemCommBuilder().load(verbose=False)


def make_mlp(given: argparse.Namespace, reduce: Callable[[Any], Any]) -> Callable[[], None]:
    """Return a training step of the MLP by DDP; `reduce` sums its buckets."""
    import torch
    from torch.distributed import GradBucket

    def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        summed: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        reduce(bucket.buffer()).div_(given.workers)
        summed.set_result(bucket.buffer())
        return summed

    model = make_model(given)
    model.register_comm_hook(None, hook)
    return mlp_step(given, model)  # type: ignore[no-any-return]


MAKE = {"round": make_round, "mlp": make_mlp}


def work(send: Send, rank: int, given: argparse.Namespace, rendezvous: Path, barrier: Any) -> None:
    """Make the steps of one rank; send DeepSpeed's version, and begin and end of each repeat."""
    os.environ |= {
        "WORLD_SIZE": str(given.workers),
        "LOCAL_SIZE": str(given.workers),
        "RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",  # DeepSpeed uses this and the next in a segment's name
        "MASTER_PORT": rendezvous.parent.name,
    }
    distributed = start(rank, given.workers, rendezvous)
    import deepspeed  # type: ignore[import-not-found]
    import torch

    load().initialize(given.workers, rank)
    step = MAKE[given.measure](given, torch.ops.deepspeed.inference_all_reduce_)

    def steps() -> None:
        for _ in range(given.steps):
            step()

    spans = time_repeats(given.repeats, barrier, steps)
    distributed.destroy_process_group()
    send((deepspeed.__version__, spans))


def main() -> None:
    """Run the ranks, and print the measurement."""
    parser = make_parser(__doc__, list(MAKE))
    add_size(parser)
    add_mlp(parser)
    given = parse(parser)
    load()  # once, before the ranks do
    with tempfile.TemporaryDirectory() as folder:
        try:
            with Children() as children:
                rendezvous = Path(folder, "rendezvous")
                barrier = children.barrier(given.workers)
                for rank in range(given.workers):
                    children.start(work, rank, given, rendezvous, barrier)
                versions, spans = zip(*children.results(), strict=True)
        finally:  # what DeepSpeed leaves
            for segment in SEGMENTS.glob(f"deepspeed_*_{Path(folder).name}_*"):
                segment.unlink()
    size = mlp_bytes(given.hidden) if given.measure == "mlp" else 4 * given.size
    report("deepspeed-shm", versions[0], given, size, seconds_of(spans))


if __name__ == "__main__":
    main()
