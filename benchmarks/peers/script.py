"""Shared code of the peers' scripts: options, child processes and output.

The scripts are run by path in the peers' virtual environment, and import this file from their
folder. So it imports only the standard library.
"""

import argparse
import json
import multiprocessing
import os
import runpy
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Measures of rows on one core, by distribution of the ids.
ONE_CORE = tuple(
    f"{law}-{work}" for law in ("zipf", "uniform") for work in ("pull", "adagrad", "row-adagrad")
)
# Default number of steps of each worker in one repeat.
STEPS = {
    "push+pull": 40, "round": 40, "mlp": 200, "death": 50, "memory": 2, "zipf-rows": 60,
    "uniform-rows": 60,
    **dict.fromkeys(ONE_CORE, 192),  # three times all lists of ids
}  # fmt: skip
RATES = {
    "push+pull": "gb_per_s",
    "round": "rounds_per_s",
    "mlp": "samples_per_s",
    "death": "deaths_per_s",
    "memory": "megabytes",
    "zipf-rows": "million_rows_per_s",
    "uniform-rows": "million_rows_per_s",
    **dict.fromkeys(ONE_CORE, "million_rows_per_s"),
}
# The code that draws ids for mpips, loaded by its path, since mpips may not be installed.
_DRAWN = runpy.run_path(str(Path(__file__).parents[2] / "mpips" / "tools" / "bench" / "row_ids.py"))
ROW_IDS, ROW_DIM, ROW_LISTS = (_DRAWN[name] for name in ("ROW_IDS", "ROW_DIM", "ROW_LISTS"))
row_ids = _DRAWN["row_ids"]

Send = Callable[[object], None]
Span = tuple[float, float]


class ChildFailed(Exception):
    """A child process ended before it sent its result; its error is on stderr."""


# Options ---------------------------------------------------------------------------------------


def make_parser(description: str, measures: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser of the scripts' common options; the first measure is the default."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    add = parser.add_argument
    add("--measure", choices=measures, default=measures[0], help="default: %(default)s")
    add("--workers", type=positive, default=2, help="default: %(default)s")
    steps = ", ".join(f"{STEPS[m]} for {m}" for m in measures)
    add("--steps", type=positive, help=f"of each worker in one repeat; default: {steps}")
    add("--repeats", type=positive, default=3, help="after one to warm up; default: %(default)s")
    add("--cores", type=core_set, help="numbers of the cores to run on, as in 0,1; default: as is")
    add("--attended", action="store_true", help="end when the standard input does")
    return parser


def add_size(parser: argparse.ArgumentParser) -> None:
    """Add the option for the length of a vector of parameters."""
    text = "float32 parameters; default: %(default)s"
    parser.add_argument("--size", type=positive, default=4 << 20, help=text)


def add_mlp(parser: argparse.ArgumentParser) -> None:
    """Add the options of the MLP 784-hidden-hidden-10."""
    add = parser.add_argument
    add("--hidden", type=positive, default=1024, help="width of the MLP; default: %(default)s")
    add("--batch", type=positive, default=64, help="samples of a worker; default: %(default)s")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, and apply the options that concern this process."""
    given = parser.parse_args()
    given.steps = given.steps or STEPS[given.measure]
    if given.cores:
        os.sched_setaffinity(0, given.cores)
    if given.attended:
        threading.Thread(target=_end_with_input, daemon=True).start()
    return given


def _end_with_input() -> None:
    while os.read(0, 1):
        continue
    os._exit(1)


def positive(text: str) -> int:
    """Convert a text to an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}, expected at least 1")
    return number


def core_set(text: str) -> set[int]:
    """Convert a list such as ``0,1`` to numbers."""
    return {int(part) for part in text.split(",")}


# Processes -------------------------------------------------------------------------------------


class Children:
    """Child processes of a script, which end with the ``with`` block.

    They also end when the script is killed.
    """

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def barrier(self, parties: int) -> Any:
        """Return a barrier for `parties` children."""
        return self._context.Barrier(parties)

    def start(self, work: Callable[..., None], *args: object) -> None:
        """Start a process that calls ``work(send, *args)``, which sends one result."""
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_child, args=(theirs, work, *args), daemon=True)
        process.start()
        theirs.close()  # so that the pipe ends with the child
        self._processes.append(process)
        self._pipes.append(ours)

    def kill(self, number: int) -> float:
        """Kill a child by its number; returns the time on the machine's clock."""
        self._processes[number].kill()
        return time.perf_counter()

    def results(self) -> list[Any]:
        """Return the result of each child, in the order of their start. Blocks: until all are sent.

        Raises:
            ChildFailed: If a child ended without a result.
        """
        found: dict[Connection, Any] = {}
        while left := [pipe for pipe in self._pipes if pipe not in found]:
            ready = wait(left)
            for pipe in left:
                if pipe in ready:
                    try:
                        found[pipe] = pipe.recv()
                    except EOFError:
                        number = self._pipes.index(pipe)
                        raise ChildFailed(f"process {number} ended without a result") from None
        return [found[pipe] for pipe in self._pipes]


def _child(pipe: Connection, work: Callable[..., None], *args: object) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    work(pipe.send, *args)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


# Times -----------------------------------------------------------------------------------------


def time_repeats(repeats: int, barrier: Any, work: Callable[[], None]) -> list[Span]:
    """Return begin and end of each repeat of `work`, after one repeat to warm up.

    All children with the same `barrier` begin each repeat together.
    """
    spans = []
    for _ in range(repeats + 1):
        barrier.wait()
        begin = time.perf_counter()
        work()
        spans.append((begin, time.perf_counter()))
    return spans[1:]


def seconds_of(spans: Sequence[Sequence[Span]]) -> list[float]:
    """Return the seconds of each repeat, from the first child's begin to the last child's end.

    The times are of the machine's clock, which all processes share.
    """
    return [
        max(end for _, end in repeat) - min(begin for begin, _ in repeat)
        for repeat in zip(*spans, strict=True)
    ]


# The line --------------------------------------------------------------------------------------


def report(
    peer: str,
    version: str,
    given: argparse.Namespace,
    size: int,
    seconds: Sequence[float],
    used_mb: float = 0.0,
) -> None:
    """Print a measurement as one line of JSON.

    Args:
        peer: Key of the table of peers.
        version: Version of the peer's package.
        given: Options of the script.
        size: Bytes of all parameters.
        seconds: Time of each repeat.
        used_mb: Memory of all processes, for the measure ``memory``.

    Rates are those of all workers at the median; ``steps_per_s`` counts a round once.
    """
    measure = given.measure
    at_once = 1 if measure in ("round", "death") else given.workers
    steps_per_s = at_once * given.steps / statistics.median(seconds)
    line = {
        "peer": peer,
        "version": version,
        "measure": measure,
        "size": size,
        "workers": given.workers,
        "seconds": list(seconds),
        "steps": given.steps,
        "steps_per_s": steps_per_s,
    }
    if measure in ("mlp", "death"):
        line |= {"hidden": given.hidden, "batch": given.batch}
    line[RATES[measure]] = used_mb or steps_per_s * _amount(given, size)
    print(json.dumps(line), flush=True)


def _amount(given: argparse.Namespace, size: int) -> float:
    """Return the amount of work in one step, in the unit of its measure."""
    if given.measure == "push+pull":
        return 2 * size / 1e9
    if given.measure.endswith("rows") or given.measure in ONE_CORE:
        return ROW_IDS / 1e6
    return given.batch if given.measure == "mlp" else 1


# Memory ----------------------------------------------------------------------------------------


def layers_of(size: int) -> tuple[int, int]:
    """Return width and number of layers with about `size` parameters in total."""
    number = 4
    return round((size / number) ** 0.5), number


def pss_mb() -> float:
    """Return the proportional set size of this process in MB."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        kilobytes = next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    return kilobytes * 1024 / 1e6


def mlp_bytes(hidden: int) -> int:
    """Return the bytes of the float32 parameters of the MLP 784-hidden-hidden-10."""
    return 4 * ((784 + 1) * hidden + (hidden + 1) * hidden + (hidden + 1) * 10)
