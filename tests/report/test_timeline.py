"""Traces of ranks, merged into a timeline."""

import gzip
import io
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import train, until

from mpips.errors import UserError
from mpips.health import status_board as board
from mpips.health import trace_file as recording
from mpips.health.trace_file import CLOCKS, Trace, Traced, folder_of, jobs_of, read
from mpips.session.tracing import JOBS, _begin_job
from mpips.tools import trace
from mpips.tools.report.phases import slices
from mpips.tools.trace import JUST_US, Timeline, read_run

ABOUT = {"rank": 1, "name": "worker 0", "host": "b", "node": 1, "workers": [1, 2]}
CLOCK = board.WORDS + board.CLOCK
BEAT = board.WORDS + board.BEAT
CODES = {**vars(board), "CLOCK": CLOCK, "BEAT": BEAT}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    board.write_to_own()
    yield
    board.trace_by(None)
    board.write_to_own()


def test_what_a_rank_tells_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "PIECE", 3)  # so that there are several
    kept = Trace(tmp_path / "rank-00001", ABOUT)
    assert board.is_traced()
    board.set_phase(board.PULLING, 1.0)
    before = board.begin_wait(board.BATCH, 2.0)
    board.end_wait(before, 3.5)
    board.report(board.HANDLED, 9)  # nobody wants it
    board.applied(4.0, 4.5, [(3, 1 << 20)])
    kept.close()
    kept.close()
    assert not board.is_traced()
    board.set_phase(board.ENDING, 9.0)
    found = read(tmp_path / "rank-00001")
    np.testing.assert_allclose(found.times - found.times[0], [0, 1, 2.5, 3, 3.5])
    kinds = [board.PULLING, board.BATCH, board.PULLING, board.APPLYING, board.SERVING]
    assert found.whats.tolist() == kinds
    assert found.values.tolist() == [0, 0, 0, 3 << 32 | 1 << 20, 0]
    whole = (tmp_path / "rank-00001").read_bytes()
    (tmp_path / "rank-00001").write_bytes(whole[:-5])  # killed as it wrote
    assert len(read(tmp_path / "rank-00001").times) == 3


def test_what_a_rank_tells_is_written_while_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change once, in order, however the thread and the rank take turns; and that it lives."""
    monkeypatch.setattr(recording, "EVERY_S", 1e-3)
    monkeypatch.setattr(recording, "PIECE", 100)
    path = tmp_path / "rank-00001"
    kept, told = Trace(path, ABOUT), 0
    while told < 20_000 or np.count_nonzero(read(path).whats == BEAT) < 10:
        for number in range(told, told + 1000):
            kept.note(board.COMPUTING, float(number), number)
        told += 1000
    until(lambda: bool((read(path).values == told - 1).any()))  # before it is closed
    beats = np.count_nonzero(read(path).whats == BEAT)
    until(lambda: np.count_nonzero(read(path).whats == BEAT) > beats)  # nothing else is told
    now = kept.now()
    until(lambda: read(path).times.max() > now)
    kept.close()
    found = read(path)
    notes = found.whats == board.COMPUTING
    np.testing.assert_array_equal(found.values[notes], np.arange(told))
    np.testing.assert_allclose(np.diff(found.times[notes]), 1.0, atol=1e-5)
    assert slices(found).ends[-1] == found.times.max()


def test_clocks_that_drift(tmp_path: Path) -> None:
    """Two hosts see the same moments; one is 5 s ahead and goes too fast, by a second a day."""
    moments, drift = np.linspace(0.0, 86_400.0, 25), 1 / 86_400
    for rank, host, theirs in (
        (0, "a", moments), (1, "b", moments * (1 + drift) + 5.0), (2, "c", moments),
    ):  # fmt: skip
        path = tmp_path / f"rank-0000{rank}"
        kept = Trace(path, {**ABOUT, "rank": rank, "host": host})
        for at in theirs.tolist():
            kept.note(board.COMPUTING, at, 0)
        kept.close()
        path.write_bytes(re.sub(rb'"epoch": [^}]*', b'"epoch": 1e9', path.read_bytes()))
    first, last = (
        f'{{"at": {1e9 + at}, "ahead": {{"b": {5.0 + at * drift}}}}}\n' for at in moments[[0, -1]]
    )
    for text, off in (
        (first + last, 0.0),
        (first + last[:20], moments * drift),  # killed as it wrote
        ("", 5.0 + moments * drift),
    ):
        (tmp_path / CLOCKS).write_text(text)
        for rank, own in ((0, 0.0), (1, off), (2, 0.0)):
            times = read(tmp_path / f"rank-0000{rank}").times
            np.testing.assert_allclose(times - 1e9 - moments, own, rtol=0, atol=1e-5)


def test_a_trace_ends_where_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recording, "PIECE", 2)
    monkeypatch.setattr(recording, "MOST", 150)
    kept = Trace(tmp_path / "rank-00000", ABOUT)
    for k in range(20):
        board.set_phase(board.PULLING, float(k))
    kept.close()
    assert len(read(tmp_path / "rank-00000").times) == 8
    assert capsys.readouterr().err.count("ends here: it is full") == 1
    (tmp_path / "rank-00001").symlink_to("/dev/full")
    Trace(tmp_path / "rank-00001", ABOUT).close()
    assert "rank-00001: No space left on device" in capsys.readouterr().err
    assert not board.is_traced()


def traced(rank: int, changes: str, workers: Sequence[int] = (0, 1)) -> Traced:
    """Return the trace of a rank with ``TIME PHASE VALUE``, ...: when it enters a phase."""
    about = {**ABOUT, "rank": rank, "name": f"name {rank}", "workers": list(workers)}
    rows = [[*change.split(), "0"][:3] for change in changes.split(",")]
    times = np.array([float(time) for time, _, _ in rows])
    whats = np.array([CODES[name] for _, name, _ in rows])
    return Traced(about, times, whats, np.array([int(value) for _, _, value in rows]))


def events(ranks: Sequence[Traced]) -> list[dict[str, Any]]:
    out = io.StringIO()
    count = Timeline(ranks).write(out)
    found: list[dict[str, Any]] = json.loads(out.getvalue())["traceEvents"]
    assert len(found) == count
    check_arrows(found)
    return found


def check_arrows(found: Sequence[dict[str, Any]]) -> None:
    """Check what Perfetto wants of arrows: whole numbers, two ends, each of them in a slice."""
    begun, ended = ([e for e in found if e["ph"] == kind] for kind in "sf")
    times = {(e["cat"], e["id"]): e["ts"] for e in begun}
    assert all(isinstance(number, int) for _, number in times)
    assert len(times) == len(begun)
    assert [(e["cat"], e["id"]) for e in ended] == list(times)
    assert all(times[e["cat"], e["id"]] <= e["ts"] for e in ended)
    for each in (*begun, *ended):
        lane = [e for e in found if e["ph"] == "X" and e["tid"] == each["tid"]]
        assert any(e["ts"] <= each["ts"] <= e["ts"] + e["dur"] + 1e-3 for e in lane)


def test_the_path_of_rounds_goes_through_the_slower_rank() -> None:
    """Two rounds: first rank 1 computes for long, then rank 0."""
    after = "5 CLOCK 7, 5 COMPUTING"
    quick = traced(0, f"0 COMPUTING, 1 SUMMING, {after}, 9 SUMMING, 10 CLOCK 8, 10 ENDING")
    slow = traced(1, f"0 COMPUTING, 4 SUMMING, {after}, 6 SUMMING, 10 CLOCK 8, 10 ENDING")
    assert Timeline([quick, slow]).shares()[0] == {board.COMPUTING: 5.0, board.SUMMING: 5.0}
    path = Timeline([quick, slow]).critical_path()
    assert sum(path.values()) == 10.0
    assert path[1, board.COMPUTING, None] == 4.0
    assert path[0, board.COMPUTING, None] == 4.0
    assert sum(s for (_, what, _), s in path.items() if what == board.SUMMING) == 2.0
    assert Timeline([quick, slow]).awaited() == [{board.SUMMING: (k, 3.0)} for k in (1, 0)]
    found = events([quick, slow])
    told = [(e["tid"], e["ts"], e["args"]["for"]) for e in found if "for" in e.get("args", ())]
    assert told == [(0, 1e6, "rank 1: name 1"), (1, 6e6, "rank 0: name 0")]
    arrows = [(e["ph"], e["tid"], e["ts"]) for e in found if e.get("cat") == "round"]
    assert arrows == [
        ("s", 1, 4e6 - JUST_US), ("f", 0, 5e6), ("s", 0, 9e6 - JUST_US), ("f", 1, 10e6),
    ]  # fmt: skip


def test_whom_the_others_wait_for_when_one_stands_still() -> None:
    """Ranks 0 and 2 are in round 8, which rank 1 never enters: it is killed as it computes."""
    begin = "0 COMPUTING, 1 SUMMING, 2 CLOCK 7, 2 BETWEEN, 3 COMPUTING"
    ranks = [
        traced(0, f"{begin}, 4 SUMMING, 5 ROUND, 99 BEAT"),
        traced(1, f"{begin}, 98.5 BEAT"),
        traced(2, f"{begin}, 6 SUMMING, 7 ROUND, 99 BEAT"),
    ]
    assert Timeline(ranks).awaited()[0] == {board.ROUND: (1, 94.0)}
    assert Timeline(ranks).awaited()[2] == {board.ROUND: (1, 92.0)}
    assert Timeline(ranks).critical_path()[1, board.COMPUTING, None] == 97.0
    assert not [e for e in events(ranks) if e.get("cat") == "round"], "nobody goes on"


def test_nobody_waits() -> None:
    """Who leaves a round before another comes, or for what was over before a wait."""
    rounds = [
        traced(0, "0 COMPUTING, 1 SUMMING, 1.5 CLOCK 1, 1.5 BETWEEN"),
        traced(1, "0 COMPUTING, 2 SUMMING, 3.5 CLOCK 1, 3.5 BETWEEN"),
    ]
    over = [
        traced(0, "0 SERVING, 0.2 APPLYING, 0.8 SERVING"),
        traced(1, "0 PUSHING, 1 BUFFER, 6 ENDING", workers=(1,)),
    ]
    for ranks in (rounds, over):
        assert Timeline(ranks).awaited() == [{}, {}]


def test_a_buffer_is_awaited_of_who_applies_ones_own_push() -> None:
    """And a shard of another node's server, however often its neighbour applies something."""
    workers, mine = (2, 3), 1 << 32
    begin, other = "0 SERVING, 1 APPLYING", f"{mine}, 4.2 SERVING, 5 APPLYING, 5.5 SERVING"
    ranks = [
        traced(0, f"{begin}, 4 SERVING, 5 APPLYING, 5.9 SERVING, 9 SERVING", workers),
        traced(1, f"{begin} {other}, 9 SERVING", workers),
        traced(2, "0 PUSHING, 1 BUFFER, 4.5 PULLING, 4.6 SHARD, 6 PULLING, 9 ENDING", workers),
        traced(3, "0 ENDING", workers),
    ]
    ranks[1].about["node"] = 5
    assert Timeline(ranks).awaited()[2] == {
        board.BUFFER: (0, 3.0),
        board.SHARD: (1, pytest.approx(0.9)),
    }


def test_the_path_of_a_slow_server_goes_through_its_updates() -> None:
    phases = "0 COMPUTING, 0.5 PUSHING, 1 BUFFER, 6 COMPUTING, 6.5 PUSHING, 7 ENDING, 7 ENDING"
    worker = traced(1, phases, workers=(1,))
    server = traced(0, "0 SERVING, 1 APPLYING, 6 SERVING, 7 SERVING")
    assert Timeline([server, worker]).critical_path() == {
        (0, board.APPLYING, None): 5.0, (1, board.COMPUTING, None): 1.0,
        (1, board.PUSHING, None): 1.0,
    }  # fmt: skip


def test_arrows_of_reads() -> None:
    """Each read of a worker to where a server takes it up; not to one before it was made."""
    workers = [
        traced(1, "0 PULLING, 1 FETCH, 3 FETCH, 6 FETCH, 9 ENDING", workers=(1, 2)),
        traced(2, "0 PULLING, 2 FETCH, 8 FETCH, 9 ENDING", workers=(1, 2)),
    ]
    answers = ((1.5, 1), (2.5, 2), (3.5, 1), (5, 2))
    phases = [f"{at} ANSWERING {rank << 32}, {at + 0.1} SERVING" for at, rank in answers]
    server = traced(0, ", ".join(["0 SERVING", *phases]), workers=(1, 2))
    found = [e for e in events([server, *workers]) if e.get("cat") == "read"]
    begun, ended = ([(e["tid"], e["ts"]) for e in found if e["ph"] == kind] for kind in "sf")
    assert begun == [(1, 1e6), (1, 3e6), (2, 2e6)]
    assert ended == [(0, 1.5e6), (0, 3.5e6), (0, 2.5e6)]


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="without traces, expected a run made with --trace"):
        read_run(tmp_path)
    folder = folder_of(tmp_path, 3)
    folder.mkdir(parents=True)
    (folder / "rank-00000").write_bytes(b"no trace\n")
    with pytest.raises(UserError, match="rank-00000 cannot be read"):
        trace.make([str(tmp_path)])
    with pytest.raises(UserError, match="--job 2, expected one of which there are traces: 3"):
        trace.make([str(tmp_path), "--job", "2"])
    (folder / "rank-00000").write_text('{"rank": 0')
    with pytest.raises(UserError, match="empty traces, expected those of ranks that have begun"):
        trace.make([str(tmp_path)])
    (folder / "rank-00001").write_text(json.dumps({**ABOUT, "epoch": 0.0}) + "\n")
    with pytest.raises(UserError, match=r"none/x\.json: No such file"):
        trace.make([str(tmp_path), "-o", str(tmp_path / "none" / "x.json")])
    assert "0.000 s" in trace.make([str(tmp_path)])
    assert "rank-00000 is empty, as of a rank that was killed" in capsys.readouterr().err
    shutil.copytree(folder, folder_of(tmp_path, 2))
    told = trace.make([str(tmp_path), "--job", "2"])
    assert "job 2 of this run's jobs 2, 3: see --job" in told


def test_the_newest_jobs_stay(tmp_path: Path) -> None:
    assert _begin_job(tmp_path) == 1
    assert _begin_job(tmp_path) == 1  # of which no rank has left anything
    for job in range(1, JOBS + 3):
        assert _begin_job(tmp_path) == job
        (folder_of(tmp_path, job) / "rank-00000").touch()
    assert jobs_of(tmp_path) == list(range(3, JOBS + 3))


@pytest.mark.launch
@pytest.mark.one_mpi
def test_the_timeline_of_a_run(tmp_path: Path) -> None:
    """Every push has an arrow to both servers, on two nodes; beside them a rank evaluates."""
    words = "--servers 2 --node-size 2 --hidden 64 --trace --steps 40 --far-read reply"
    words += " --evaluators 1 --eval-every 0.5 --quiet --out run"
    train(5, *words.split(), cwd=tmp_path).check()
    text = trace.make([str(tmp_path / "run"), "-o", str(tmp_path / "t.json.gz")])
    path = text.partition("critical path")[2]
    assert "rank 1" in path or "rank 3" in path
    assert "rank 4" not in path, "nobody waits for who evaluates"
    (evaluator,) = re.findall("rank   4  evaluator 0 .*", text)
    for what in ("waits for an evaluation", "reading a checkpoint", "evaluating"):
        assert what in evaluator
    found = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["traceEvents"]
    assert len({(e["pid"], e["tid"]) for e in found if e["ph"] == "X"}) == 5
    check_arrows(found)
    ended = [e["cat"] for e in found if e["ph"] == "f"]
    assert ended.count("push") == 2 * 80  # 40 steps of two workers at two servers
    assert 80 <= ended.count("read") <= 84  # at the other node's server, the next ones asked too
    parts = list(map(slices, ranks := read_run(tmp_path / "run")))
    assert all((each.ends >= each.begins).all() for each in parts)
    first, last = min(each.begins[0] for each in parts), max(each.ends[-1] for each in parts)
    assert sum(Timeline(ranks).critical_path().values()) <= last - first + 1e-6
