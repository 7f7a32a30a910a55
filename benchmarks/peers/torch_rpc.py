"""A parameter server over torch.distributed.rpc, as in PyTorch's tutorial.

Rank 0 owns the parameters. In each step, a worker makes one call that pushes a gradient and returns
the updated parameters, and computes the next gradient from them.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from script import (  # type: ignore[import-not-found]
    Children,
    Send,
    add_size,
    make_parser,
    parse,
    report,
    seconds_of,
    time_repeats,
)

THREADS = 4  # threads of each process that answer calls
TIMEOUT_S = 300

server: dict[str, Any] = {}  # "params" on rank 0


def push_pull(grad: Any) -> Any:
    """Apply a gradient on the server, and return its parameters."""
    params = server["params"]
    params.sub_(grad, alpha=1e-3)
    return params


def join(rank: int, given: argparse.Namespace, rendezvous: Path) -> None:
    """Join the world of one server and all workers over the loopback interface."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo")
    import torch
    from torch.distributed import rpc

    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=THREADS, rpc_timeout=TIMEOUT_S, init_method=f"file://{rendezvous}"
    )
    world = given.workers + 1
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world, rpc_backend_options=options)


def serve(send: Send, given: argparse.Namespace, rendezvous: Path) -> None:
    """Serve the parameters until all workers have finished."""
    import torch
    from torch.distributed import rpc

    server["params"] = torch.zeros(given.size)
    join(0, given, rendezvous)
    rpc.shutdown()
    send(torch.__version__)


def work(send: Send, rank: int, given: argparse.Namespace, rendezvous: Path, barrier: Any) -> None:
    """Push and pull; send begin and end of each repeat."""
    import torch
    from torch.distributed import rpc

    join(rank, given, rendezvous)

    def steps() -> None:
        grad = torch.ones(given.size)
        for _ in range(given.steps):
            params = rpc.rpc_sync("rank0", push_pull, args=(grad,))
            grad = params * 1e-3 + 1e-3

    spans = time_repeats(given.repeats, barrier, steps)
    rpc.shutdown()
    send(spans)


def main() -> None:
    """Run the server and the workers, and print the measurement."""
    parser = make_parser(__doc__, ["push+pull"])
    add_size(parser)
    given = parse(parser)
    with tempfile.TemporaryDirectory() as folder, Children() as children:
        rendezvous = Path(folder, "rendezvous")
        barrier = children.barrier(given.workers)
        children.start(serve, given, rendezvous)
        for rank in range(1, given.workers + 1):
            children.start(work, rank, given, rendezvous, barrier)
        version, *spans = children.results()
    report("torch-rpc", version, given, 4 * given.size, seconds_of(spans))


if __name__ == "__main__":
    main()
