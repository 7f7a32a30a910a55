"""Training a multi-layer perceptron with two workers, beside twice what one rank alone does.

Samples per second of whole runs, 784-1024-1024-10 with batches of 64 a worker: asynchronous with
one server and two workers, and synchronous on two ranks.
"""

from functools import partial

from mpips.bench.jobs import Perceptron, compare_rates, take_turns, temporary_folder
from mpips.bench.measure import Options, Row

SIDES = {
    "async": (3, ("--mode", "async", "--servers", "1")),
    "sync": (2, ("--mode", "sync")),
    "alone": (1, ("--mode", "sync", "--threads", "1")),
}
RANKS = {"async": "1 server, 2 workers", "sync": "2 ranks"}
WORKERS = 2


def run(options: Options) -> list[Row]:
    """Compare both modes.

    Raises:
        Failed: If a run fails.
    """
    with temporary_folder() as folder:
        job = Perceptron(folder, options.quick)
        sides = {k: partial(job.rate, n, *words) for k, (n, words) in SIDES.items()}
        found = take_turns(sides, options.repeats)
    ideal = [WORKERS * rate for rate in found["alone"]]
    rows = []
    for mode, ranks in RANKS.items():
        mine, other, ratio = compare_rates(found[mode], ideal)
        case = f"{job.case}, {mode}, {ranks}"
        beside = f"{WORKERS} x one rank alone"
        rows.append(Row("mlp", case, mine, "samples/s", beside, other, ratio))
    return rows
