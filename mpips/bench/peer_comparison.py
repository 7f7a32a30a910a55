"""mpips beside its peers: the same work, in turns, each in processes of its own."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from mpips.bench import jobs, peers
from mpips.bench.catalogue import MEASURES
from mpips.bench.measure import Options, Row, bytes_text

LIMIT_S = 300.0
QUICK_STEPS = 4


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        measure: The measure of mpips that it belongs to.
        peer: A key of `peers.PEERS`.
        work: A key of `peers.UNITS`.
        case: What is shown.
        ranks: Ranks of mpips; servers and workers together.
        workers: Workers on either side.
        steps: Steps of a peer's worker in one repeat.
        reach: The least ratio that is aimed at.
        size: Bytes of the parameters.
        options: Of `mpips.train`, where that is run.
    """

    measure: str
    peer: str
    work: str
    case: str
    ranks: int
    workers: int
    steps: int
    reach: float
    size: int = 0
    options: tuple[str, ...] = ()


def _push_pull(peer: str, size: int, steps: int, reach: float) -> Case:
    case = f"{bytes_text(size)}, 1 server, 2 workers"
    return Case("pushpull", peer, "push+pull", case, 3, 2, steps, reach, size)


def _train(peer: str, ranks: str, world: int, reach: float, *options: str) -> Case:
    return Case("mlp", peer, "mlp", ranks, world, 2, 200, reach, options=options)


CASES = (
    _push_pull("tensorflow-ps", 64 << 10, 400, 10),
    _push_pull("tensorflow-ps", 1 << 20, 200, 10),
    _push_pull("tensorflow-ps", 16 << 20, 30, 5),
    _push_pull("torch-rpc", 16 << 20, 30, 3),
    Case("rounds", "torch-ddp", "round", "16.8 MB, 2 ranks", 2, 2, 30, 4, 16 << 20),
    _train("tensorflow-ps", "async, 1 server, 2 workers", 3, 2, "--servers", "1"),
    _train("torch-ddp", "sync, 2 ranks", 2, 1.6, "--mode", "sync"),
)
NAMES = {"push+pull": "push+pull", "round": "sync round", "mlp": "mlp"}


def parts(measure: str, options: Options) -> Iterator[tuple[str, Callable[[], list[Row]]]]:
    """Yield the comparisons that belong to a measure of mpips, each with a label.

    Raises:
        UserError: If the peers' virtual environment does not work.
    """
    assert options.peers is not None, "no virtual environment is named"
    absent = peers.missing(options.peers)
    for case in CASES:
        if case.measure == measure and case.peer not in absent:
            yield f"{measure}, {case.peer}, {case.case}", partial(_compare, case, options)


def _compare(case: Case, options: Options) -> list[Row]:
    """Take turns with a peer.

    Raises:
        Failed: If a run of mpips fails.
        UserError: If one of the peer does.
    """
    assert options.peers is not None, "no virtual environment is named"
    steps = QUICK_STEPS if options.quick else case.steps

    def theirs() -> float:
        assert options.peers is not None
        return peers.measure(
            options.peers, case.peer, case.work, size=case.size, workers=case.workers,
            steps=steps, repeats=1, timeout_s=LIMIT_S,
        ).rate  # fmt: skip

    with jobs.temporary_folder() as folder:
        text = case.case
        ours: Callable[[], float] = partial(_world, case)
        if case.work == "mlp":
            job = jobs.Perceptron(folder, options.quick)
            text, ours = f"{job.case}, {text}", partial(job.rate, case.ranks, *case.options)
        found = jobs.take_turns({"mpips": ours, "peer": theirs}, options.repeats)
    mine, other, ratio = jobs.compare_rates(found["mpips"], found["peer"])
    unit = peers.UNITS[case.work]
    if case.work == "round":  # shown as times, as the other rounds are
        mine, other, unit = 1e3 / mine, 1e3 / other, "ms"
    return [Row(NAMES[case.work], text, mine, unit, case.peer, other, ratio, case.reach)]


def _world(case: Case) -> float:
    """Return the rate of mpips in a world of its own, in the peer's unit."""
    only = Options(repeats=1, sizes=(case.size,))
    (row,) = jobs.world(MEASURES[case.measure], case.ranks, only)
    return row.value if row.unit == "GB/s" else 1e3 / row.value
