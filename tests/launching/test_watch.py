"""What a supervisor sees of a job: files that its ranks write, and the state of processes."""

import contextlib
import faulthandler
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from launch import environment, python

from mpips.launch import heartbeat
from mpips.launch.heartbeat import Terms
from mpips.launch.watch import Heartbeats, Rank, Run, Watch, saved_step
from mpips.mpi.process import GONE, STOPPED
from mpips.session.metrics import Log

TIMEOUT_S = 60.0
OVER = '{"kind": "end", "step": 9, "reason": "epochs"}\n'
WAITS = """
import sys, time
from pathlib import Path
from mpips.launch import heartbeat
def waits_for_ever():
    time.sleep(600)
heartbeat.begin(Path(sys.argv[1]), sys.argv[2])
waits_for_ever()
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Heartbeats]:
    job = Heartbeats(tmp_path / "1")
    job.begin(Terms())
    yield job
    job.close()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Path]:
    """This process as a rank, and the folder of the run that it is to begin."""
    yield tmp_path / "run"
    for number in (heartbeat.DUMP, heartbeat.DUMP_REMOTE):
        faulthandler.unregister(number)
    while heartbeat._files:
        heartbeat._files.pop().close()


def begin(
    job: Heartbeats, out: Path, resume: str = "", log_s: float = 0.25, spares: Sequence[int] = ()
) -> None:
    heartbeat.begin(job.folder, "0")
    (out / "checkpoints").mkdir(parents=True)
    (out / "metrics.jsonl").write_text('{"kind": "end", "step": 3, "reason": "SIGUSR1"}\n')
    heartbeat.report_run(out, resume, log_s, spares)


def begun(out: Path, size: int = 0) -> Run:
    told = {"run": str(out), "resume": "auto", "log_every_s": 1, "spares": [], "size": size}
    return Run(told)


def add(out: Path, text: str) -> None:
    """Write more lines of a run's metrics."""
    with (out / "metrics.jsonl").open("a") as file:
        file.write(text)


def first(watch: Watch, looks: Sequence[int], does: Callable[[], object] = int) -> tuple[int, str]:
    """Look at times, after `does`; returns when something hangs, -1 if nothing does, and what."""
    found = ((now, (does(), watch.look(now))[1]) for now in looks)
    return next(((now, what) for now, what in found if what), (-1, ""))


def test_a_folder_that_somebody_has_cleared(job: Heartbeats, rank: Path) -> None:
    """The job goes on as far as it can, and another attempt has its folder again."""
    heartbeat.begin(job.folder, "0")
    (job.folder / f"1{heartbeat.LINES}").symlink_to("gone")  # since the folder was listed
    (job.folder / f"2{heartbeat.LINES}").mkdir()  # an error, as of a file server
    job.read()
    shutil.rmtree(job.folder.parent)
    job.read()
    assert "does not answer" in job.ask_for_stacks(os.getpid(), 0.0)
    job.end()
    job = Heartbeats(job.folder.parent / "2")
    job.begin(Terms())
    assert (job.folder / heartbeat.CURRENT).is_file()


def test_the_terms_of_a_long_job_do_not_grow_old(job: Heartbeats) -> None:
    """Systems clear /tmp of files that nobody touches for days, and ranks end without this one."""
    current = job.folder / heartbeat.CURRENT
    minute_ago = time.time() - 60
    for before, is_touched in ((0.0, True), (minute_ago, False)):
        os.utime(current, (before, before))
        job.read()
        assert (current.stat().st_mtime > minute_ago + 30) is is_touched, "each is a write on NFS"


def test_ranks_know_what_the_supervisor_does(tmp_path: Path, rank: Path) -> None:
    """If it does not watch them, they end a job that stands still; without one nothing is told."""
    heartbeat.report_run(tmp_path / "nowhere", "", 1.0)
    heartbeat.report_exit(0)
    assert (heartbeat.timeout_s(), heartbeat.terms()) == (0.0, None)
    with pytest.raises(Exception, match=r"/none on .*: No such file .*; on several nodes start"):
        heartbeat.begin(tmp_path / "none", "0")
    job, terms = Heartbeats(tmp_path / "signs"), Terms(12.0, 3, True, "why")
    job.begin(terms)
    heartbeat.begin(job.folder, "0")
    assert (heartbeat.timeout_s(), heartbeat.terms()) == (12.0, terms)
    job.end()
    assert heartbeat.timeout_s(), "its attempt is over"


def test_what_a_rank_tells(job: Heartbeats, rank: Path) -> None:
    begin(job, rank, resume="auto")
    job.read()
    assert [(r.name, r.host, r.pid) for r in job.ranks] == [("0", platform.node(), os.getpid())]
    assert job.ranks[0].trouble == ""
    assert job.alive() == [os.getpid()]
    (run,) = job.runs
    assert (run.out, run.resumes, run.is_done, saved_step(rank)) == (rank, True, False, -1)
    assert run.last() == (-1, ""), "what is there of an earlier start is not this one's"
    add(rank, '{"kind": "train", "step": 7}\n\0\n{"kind": "warning", "step": null}\n')
    add(rank, f'{OVER}{{"kind": "eva')
    assert run.last() == (9, "epochs")
    for step, whole in ((4, True), (8, False)):
        folder = rank / "checkpoints" / f"step-{step:012d}"
        folder.mkdir()
        (folder / ("index.h5" if whole else "shard-0000.h5.tmp")).touch()
    assert saved_step(rank) == 4
    heartbeat.report_exit(85)
    job.read()
    job.read()
    assert (job.codes, len(job.ranks), len(job.runs)) == ({"0": 85}, 1, 1)
    moved = rank.rename(rank.with_name("moved"))
    (moved / "DONE").touch()
    assert (run.out, run.is_done) == (moved, True)


def test_half_a_line_is_read_later(job: Heartbeats) -> None:
    told = json.dumps({"host": "h", "pid": 1, "started": 2}) + "\n"
    for text, ranks in ((told[:9], 0), (told, 1)):
        (job.folder / "5.jsonl").write_text(text)
        job.read()
        assert len(job.ranks) == ranks
    assert job.ranks == [Rank("5", "h", 1, 2)]
    (job.folder / "5.jsonl").write_text(f'{told}{{"run": "/{{"run": "/a"}}\n{{"code": 3}}\n')
    job.read()
    assert (job.codes, job.runs) == ({"5": 3}, []), "a full disk has cut a line, which a rank says"
    assert (job.ranks[0].trouble, job.alive()) == ("", []), "of another host nothing is known"


def test_a_rank_tells_the_code_that_its_launcher_sees(job: Heartbeats, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("raise SystemExit(-1)")
    python("-m", "mpips.launch.rank", str(job.folder), "ends.py", cwd=tmp_path, code=255)
    job.read()
    assert list(job.codes.values()) == [255]


def test_the_end_of_a_run_in_a_folder_made_anew(job: Heartbeats, rank: Path) -> None:
    begin(job, rank)
    job.read()
    (run,) = job.runs
    add(rank, '{"kind": "train", "step": 1000, "loss": 0.25}\n')
    assert run.last() == (1000, "")
    shutil.rmtree(rank)
    assert run.last() == (1000, "")
    rank.mkdir()
    for step in (3, 7):  # as many bytes as were read, and more
        add(rank, f'{{"kind": "end", "step": {step}, "reason": "SIGUSR1"}}\n')
        assert run.last() == (step, "SIGUSR1")


@pytest.mark.parametrize("shown", [None, 1, 2])
def test_a_file_of_another_host_that_is_seen_late(shown: int | None, tmp_path: Path) -> None:
    """What is of an earlier start stays that, though not all of it is there at first."""
    lines = [f'{{"kind": "end", "step": {step}, "reason": "SIGTERM"}}\n' for step in (3, 5, 7)]
    metrics = tmp_path / "metrics.jsonl"
    if shown is not None:
        metrics.write_text("".join(lines[:shown]))
    with contextlib.closing(begun(tmp_path, len("".join(lines)))) as run:
        assert run.last() == (-1, "")
        metrics.write_text("".join(lines))
        assert run.last() == (-1, "")
        for step in (8, 9):
            add(tmp_path, f'{{"kind": "train", "step": {step}}}\n')
            assert run.last() == (step, "")


def test_a_file_that_goes_hides_no_others(tmp_path: Path) -> None:
    """As when a checkpoint is removed meanwhile."""
    first, gone, third = (tmp_path / "checkpoints" / f"step-{k}" / "part" for k in range(3))
    for part in (first, gone, third):
        part.parent.mkdir(parents=True)
        part.write_text("1234")
    gone.unlink()
    gone.symlink_to("gone")
    with contextlib.closing(begun(tmp_path)) as run:
        assert run.saving() == [(str(first), 4), (str(third), 4)]


def test_a_job_gets_on_while_its_files_grow(job: Heartbeats, rank: Path) -> None:
    watch = Watch(job, TIMEOUT_S, program=False, now=0)
    assert first(watch, range(0, 60, 5))[0] == -1
    begin(job, rank)  # which is a sign of life
    assert first(watch, range(60, 115, 5))[0] == -1
    with Log(rank / "metrics.jsonl", 0.0) as log:
        log.event("train", 1)  # as is this, though the disk be full
        log.event("train", 2)
    assert first(watch, range(115, 170, 5))[0] == -1
    shard = rank / "checkpoints" / "step-000000000004" / "shard-0000.h5.tmp"
    shard.parent.mkdir()
    shard.write_text("half")
    stands = f"nothing has happened in {rank} for 60 s"
    assert first(watch, range(170, 300, 5)) == (230, stands)


def test_a_job_that_never_begins(job: Heartbeats) -> None:
    """A supervisor that was stopped itself has not seen that."""
    watch = Watch(job, TIMEOUT_S, program=True, now=0)
    stands = "nothing has happened before a run began for 60 s"
    assert first(watch, range(0, 100, 5)) == (60, stands)
    watch = Watch(job, TIMEOUT_S, program=False, now=0)
    assert watch.look(5) == watch.look(3600) == watch.look(3605) == ""


@pytest.mark.parametrize(
    ("program", "log_s", "more", "stands"),
    [(False, 0.25, OVER, 60), (True, 0.25, OVER, -1), (False, 100, "", 200)],
    ids=["over", "program", "rare lines"],
)
def test_how_long_a_job_may_tell_nothing(
    program: bool, log_s: float, more: str, stands: int, job: Heartbeats, rank: Path
) -> None:
    """After its run nobody knows what a program does; lines that come rarely are waited for."""
    begin(job, rank, log_s=log_s)
    add(rank, more)
    watch = Watch(job, TIMEOUT_S, program, now=0)
    assert first(watch, range(0, 300, 5))[0] == stands
    assert stands < 0 or watch.quiet_s == stands


def test_processes_that_are_stopped_or_gone(job: Heartbeats) -> None:
    """They are found though the job gets on; their stacks are shown, alike ones once."""
    command = [sys.executable, "-c", WAITS, str(job.folder)]
    children = [subprocess.Popen([*command, f"{k}"], env=environment()) for k in range(4)]
    try:
        while len(job.ranks) < 4:
            assert not any(child.poll() for child in children)
            job.read()
        first_, second, third, fourth = job.ranks
        assert [rank.trouble for rank in job.ranks] == [""] * 4
        os.kill(children[2].pid, signal.SIGSTOP)
        os.waitpid(children[2].pid, os.WUNTRACED)
        children[3].kill()
        while fourth.trouble != GONE:  # a zombie
            assert len(job.alive()) >= 3
        assert [rank.trouble for rank in job.ranks] == ["", "", STOPPED, GONE]
        other = Rank("9", platform.node(), children[0].pid, first_.started - 1)
        assert other.trouble == GONE, "another process of that number"
        watch = Watch(job, TIMEOUT_S, program=False, now=0)
        found = first(watch, range(0, 65, 5), lambda: (job.folder / "9.jsonl").write_text(""))
        assert found == (60, f"{third} is stopped for 60 s")
        told = job.ask_for_stacks(0, 10)
        assert told.startswith(f"{first_}, {second}:\n")
        assert told.count("in waits_for_ever") == told.count("Current thread") == 1
        assert told.endswith(f"{third}:\n  is stopped\n{fourth}:\n  is gone\n")
    finally:
        for child in children:
            child.kill()
            child.wait(10)


def gone(name: str) -> Rank:
    """Return a rank whose process id is another one's by now."""
    return Rank(name, platform.node(), os.getpid(), 0)


def test_a_job_that_waits_for_a_rank_that_is_gone(job: Heartbeats) -> None:
    """It is named, though it was missed some looks after the job had stood still."""
    watch = Watch(job, TIMEOUT_S, program=False, now=0)
    assert first(watch, range(0, 20, 2))[0] == -1
    job.ranks = [gone("1")]
    assert first(watch, range(20, 100, 2)) == (60, f"{job.ranks[0]} is gone for 40 s")


@pytest.mark.parametrize("spares", [(), (1, 2)])
@pytest.mark.parametrize("one", [gone("1"), Rank("1", "west", 7, 0)], ids=["here", "elsewhere"])
def test_a_rank_that_is_gone_where_mpi_ends_nobody(
    spares: Sequence[int], one: Rank, job: Heartbeats, rank: Path
) -> None:
    """A run that does not go on without it, and does not end by itself, is to be ended."""
    begin(job, rank, spares=spares)
    job.ranks = [one]
    watch = Watch(job, TIMEOUT_S, program=False, now=0, survives=True, gone={"west": {7}})
    expected = (-1, "") if spares else (10, f"{job.ranks[0]} is gone for 10 s")
    assert first(watch, range(0, 40, 2), heartbeat.beat) == expected


@pytest.mark.parametrize("others", [{}, {"2": 1}])
def test_a_rank_that_failed_where_mpi_ends_nobody(
    others: Mapping[str, int], job: Heartbeats, rank: Path
) -> None:
    """Those that wait for it are to be ended, unless all have come to their end."""
    begin(job, rank)
    job.ranks = [gone("2")]
    (job.folder / "0.jsonl").write_text("")
    for name, code in {"1": 1, **others}.items():
        (job.folder / f"{name}.jsonl").write_text(json.dumps({"code": code}) + "\n")
    assert heartbeat.another_failed()
    watch = Watch(job, TIMEOUT_S, program=True, now=0, survives=True)
    job.codes = {"1": 1, **others}
    expected = "rank 1 has ended with exit code 1, and others have not"
    assert (first(watch, range(2, 14, 2))[1] == expected) is not bool(others)
