"""What is said to cross the links, against the messages and Gets of whole jobs, counted."""

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from verdict import check

from mpips.config.command_line import parse_command_line
from mpips.config.jobfile import resolve
from mpips.mpi import start as tags
from mpips.mpi.collectives import Arrays
from mpips.mpi.start import MPI
from mpips.mpi.window import Window
from mpips.mpi.world import Cluster
from mpips.planning.explain import Explanation, Topology, codec_ratios, explain
from mpips.session import run as session
from mpips.session import setup

pytestmark = [pytest.mark.mpi(min_size=3), pytest.mark.world(max_size=4, min_nodes=2)]

STEPS = 6
GRADS, PARAMS = range(2)
KIND = {tags.TAG_PARTIAL: GRADS, tags.TAG_RESULT: PARAMS}
for server in range(8):
    KIND |= {tags.tag_of(server, tags.BODIES): GRADS, tags.tag_of(server, tags.REPLIES): PARAMS}


class Counter:
    """Bytes that this rank moved between nodes, shape (kinds, nodes, sent and received)."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.moved = np.zeros((2, cluster.nodes, 2))

    def note(self, kind: int, source: int, dest: int, nbytes: int) -> None:
        a, b = self._cluster.node_of[source], self._cluster.node_of[dest]
        if a != b:
            self.moved[kind, a, 0] += nbytes
            self.moved[kind, b, 1] += nbytes


class Counted(MPI.Intracomm):
    """A communicator that counts what is sent; what has no kind (headers) apart."""

    counter: Counter

    def _note(self, buffer: Any, dest: int, tag: int) -> None:
        kind = KIND.get(tag)
        words = kind == PARAMS and buffer.nbytes == 64 and tag != tags.TAG_RESULT  # versions
        if kind is not None and not words:
            self.counter.note(kind, self.rank, dest, buffer.nbytes)

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> MPI.Request:
        self._note(buf, dest, tag)
        return super().Isend(buf, dest, tag)

    def Issend(self, buf: Any, dest: int, tag: int = 0) -> MPI.Request:
        self._note(buf, dest, tag)
        return super().Issend(buf, dest, tag)


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> list[Counter]:
    """Count in the jobs from now on; returns the counter of each."""
    made: list[Counter] = []

    class Counting(Cluster):
        def __init__(self, comm: MPI.Intracomm, *args: Any) -> None:
            super().__init__(comm, *args)
            made.append(Counter(self))
            self.comm = Counted(self.comm)
            self.comm.counter = made[-1]
            self.arrays = Arrays(self.comm)

    plain = Window.get

    def get(window: Window, rank: int, name: str, out: np.ndarray, begin: int = 0) -> Any:
        if name == "params":
            made[-1].note(PARAMS, rank, window._cluster.rank, out.nbytes)
        return plain(window, rank, name, out, begin)

    monkeypatch.setattr(setup, "Cluster", Counting)
    monkeypatch.setattr(Window, "get", get)
    return made


def count(cluster: Cluster, words: list[str], counters: list[Counter]) -> np.ndarray:
    """Run a job, judge its summary; returns its bytes, shape (kinds, nodes, sent and received)."""
    folder = cluster.comm.bcast(tempfile.mkdtemp() if cluster.rank == 0 else None)
    line = parse_command_line([*words, f"--out={Path(folder) / 'run'}"])
    code = session.run(line, time.perf_counter())
    check(cluster.comm, code == 0, code)
    told, counted = explained(cluster, words), dict[str, int]()
    if cluster.rank == 0:
        counted = json.loads((Path(folder) / "run" / "summary.json").read_text())
        shutil.rmtree(folder)
    behind = 1 + (told.config.delay_compensation > 0)  # what a gradient was computed from
    pushed, pulled = STEPS * told.pushed / behind, counted.get("bytes_pulled", 0)
    good = not counted or counted["bytes_pushed"] == pushed
    good &= not counted or STEPS <= pulled / told.pulled <= STEPS + 2  # ahead, at the end
    check(cluster.comm, good, (counted.get("bytes_pushed"), pushed, pulled, told.pulled))
    moved: np.ndarray = cluster.comm.allreduce(counters[-1].moved)
    return moved


def explained(cluster: Cluster, words: list[str], **changes: Any) -> Explanation:
    config = resolve({**parse_command_line(words).options, **changes})
    (width,) = config.hidden
    n = 64 * width + width + width * 10 + 10
    codecs = codec_ratios(n, config.dtype)
    return explain(config, Topology(cluster.hosts, cluster.node_of, n, 1.0, codecs=codecs))


def said(cluster: Cluster, words: list[str], **changes: Any) -> np.ndarray:
    """Return what a step is said to move, of the shape of `count`."""
    return explained(cluster, words, **changes).flows.sum(axis=1).swapaxes(0, 1)


def words_of(options: str, node_size: int) -> list[str]:
    """Return the command line of a job of `STEPS` steps of each worker."""
    job = f"--steps={STEPS} --hidden=300 --batch-size=8 --quiet --eval-every=0"
    return [*options.split(), *job.split(), f"--node-size={node_size}"]


@pytest.mark.parametrize(
    "options",
    [
        "--no-share-pulls --far-read=get --delay-compensation=0.5",
        "--no-share-pulls --far-read=reply --prefetch",
        "--share-pulls --far-read=reply --node-aggregation --servers=1",
    ],
)
def test_servers(cluster: Cluster, node_size: int, options: str, counters: list[Counter]) -> None:
    words = words_of(options, node_size)
    moved = count(cluster, words, counters)
    least = STEPS * said(cluster, words)
    most = STEPS * said(cluster, words, node_aggregation=False, share_pulls=False)
    at_end = 3  # pulls of a worker that are ahead at the end, and the last of all
    check(cluster.comm, bool((least <= moved).all()), (least, moved))
    check(cluster.comm, bool((moved[GRADS] <= most[GRADS]).all()), (moved, most))
    with_end = most[PARAMS] * (STEPS + at_end) / STEPS
    check(cluster.comm, bool((moved[PARAMS] <= with_end).all()), (moved, with_end))


@pytest.mark.parametrize("options", ["--servers=0", "--servers=1"])
def test_rounds(cluster: Cluster, node_size: int, options: str, counters: list[Counter]) -> None:
    words = words_of(f"--mode=sync {options}", node_size)
    moved = count(cluster, words, counters)
    step = said(cluster, words)
    check(cluster.comm, bool((moved[GRADS] == STEPS * step[GRADS]).all()), (moved, step))
    first = step[PARAMS]  # the initial parameters
    check(cluster.comm, bool((moved[PARAMS] == STEPS * step[PARAMS] + first).all()), (moved, step))


@pytest.mark.parametrize("codec", ["int8", "topk"])
def test_packed_rounds(
    cluster: Cluster, node_size: int, codec: str, counters: list[Counter]
) -> None:
    """A shard is rounded up to whole buckets, topk to whole elements."""
    pull = "fp16" if codec == "topk" else codec
    words = words_of(f"--mode=sync --codec={codec} --pull-codec={pull}", node_size)
    words[words.index("--hidden=300")] = "--hidden=1200"
    moved = count(cluster, words, counters)
    step = said(cluster, words)
    good = np.allclose(moved[GRADS], STEPS * step[GRADS], rtol=1e-2)
    good &= np.allclose(moved[PARAMS], (STEPS + 1) * step[PARAMS], rtol=1e-2)
    check(cluster.comm, bool(good), (moved, step))
    raw = said(cluster, words, codec="none", pull_codec="none")
    check(cluster.comm, bool((moved[GRADS] < 0.51 * STEPS * raw[GRADS]).all()), (moved, raw))
