"""torchft over gloo, with each worker as a replica group: an MLP, or a worker's death.

The manager averages gradients as one vector, since an assertion in torchft's
DistributedDataParallel fails at a death (torchft 0.2.0). The lighthouse, which coordinates the
managers, is a separate process.
"""

import argparse
import contextlib
import importlib.metadata
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from script import (  # type: ignore[import-not-found]
    Children,
    Send,
    add_mlp,
    make_parser,
    mlp_bytes,
    parse,
    report,
    seconds_of,
    time_repeats,
)

SAMPLES = 8192
LOOK_S, LIMIT_S = 0.005, 120.0
JOIN_MS = 2000  # time that the lighthouse waits for late replicas
GROUP_S, MANAGER_S = timedelta(seconds=5), timedelta(seconds=10)


def make_step(given: argparse.Namespace, rank: int, port: int) -> tuple[Callable[[], None], Any]:
    """Return a step of the MLP, which averages all replicas' gradients, and the manager."""
    import torch
    import torchft  # type: ignore[import-not-found]
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    # The store must outlive the manager.
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    layers = (nn.Linear(784, given.hidden), nn.ReLU(), nn.Linear(given.hidden, given.hidden))
    model = nn.Sequential(*layers, nn.ReLU(), nn.Linear(given.hidden, 10))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["sgd"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=GROUP_S), min_replica_size=1, load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "sgd": sgd.state_dict()},
        replica_id=f"{rank}", timeout=MANAGER_S,
        store_addr="127.0.0.1", store_port=port, rank=0, world_size=1,
    )  # fmt: skip
    manager.benchmark_store = store
    optimizer = torchft.Optimizer(manager, sgd)
    x, y = torch.rand(SAMPLES, 784), torch.randint(0, 10, (SAMPLES,))
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))

    def step() -> None:
        batch = torch.randint(0, SAMPLES, (given.batch,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None], out=flat)
        manager.allreduce(flat).wait()
        at = 0
        for p in model.parameters():
            assert p.grad is not None
            p.grad.copy_(flat[at : at + p.numel()].view_as(p))
            at += p.numel()
        optimizer.step()

    return step, manager


def train(send: Send, rank: int, given: argparse.Namespace, port: int, barrier: Any) -> None:
    """Make the steps of one replica; send begin and end of each repeat."""
    step, _ = make_step(given, rank, port)

    def steps() -> None:
        for _ in range(given.steps):
            step()

    spans = time_repeats(given.repeats, barrier, steps)
    send(spans)
    barrier.wait()
    os._exit(0)  # its threads wait for each other


def train_on(send: Send, rank: int, given: argparse.Namespace, port: int, note: Path) -> None:
    """Make steps without end, and write the time at which each was committed."""
    step, manager = make_step(given, rank, port)
    with note.open("w", buffering=1) as file:
        while True:
            before = manager.current_step()
            step()
            if manager.current_step() > before:
                file.write(f"{time.perf_counter():.6f}\n")


@contextlib.contextmanager
def lighthouse() -> Iterator[list[int]]:
    """Start the lighthouse, and yield unused ports."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(9)]
        for one in sockets:
            one.bind(("", 0))
        first, *ports = (one.getsockname()[1] for one in sockets)
    program = Path(sys.executable).with_name("torchft_lighthouse")
    words = ["--min_replicas", "1", "--join_timeout_ms", f"{JOIN_MS}", "--bind", f"[::]:{first}"]
    os.environ |= {
        "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{first}", "GLOO_SOCKET_IFNAME": "lo"
    }  # fmt: skip
    process = subprocess.Popen([program, *words], stdout=subprocess.DEVNULL)
    try:
        yield ports
    finally:
        process.kill()
        process.wait()


def death_s(given: argparse.Namespace) -> float:
    """Return the seconds from the death of the last replica to the next step of the first."""
    with lighthouse() as ports, tempfile.TemporaryDirectory() as folder, Children() as children:
        notes = [Path(folder, f"{rank}") for rank in range(given.workers)]
        for rank, note in enumerate(notes):
            children.start(train_on, rank, given, ports[rank], note)
        deadline = time.perf_counter() + LIMIT_S

        def committed() -> list[float]:
            """Return the times at which the first replica has committed steps."""
            if time.perf_counter() > deadline:
                raise TimeoutError(f"no step within {LIMIT_S:g} s")
            time.sleep(LOOK_S)
            text = notes[0].read_text() if notes[0].exists() else ""
            return [float(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

        while len(committed()) < given.steps or not notes[-1].stat().st_size:
            pass
        killed = children.kill(given.workers - 1)
        while committed()[-1] < killed:
            pass
        return next(at for at in committed() if at > killed) - killed


def main() -> None:
    """Run the replicas, and print the measurement."""
    parser = make_parser(__doc__, ["mlp", "death"])
    add_mlp(parser)
    given = parse(parser)
    if given.measure == "death":
        seconds = [death_s(given) for _ in range(given.repeats)]
        given.steps = 1
    else:
        with lighthouse() as ports, Children() as children:
            barrier = children.barrier(given.workers)
            for rank in range(given.workers):
                children.start(train, rank, given, ports[rank], barrier)
            seconds = seconds_of(children.results())
    version = importlib.metadata.version("torchft")
    report("torchft", version, given, mlp_bytes(given.hidden), seconds)


if __name__ == "__main__":
    main()
