"""What a supervisor sees of a job: files that its ranks write, and the state of processes."""

import faulthandler
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from launch import environment

from mpips.checkpoint.place import Tail
from mpips.cluster.process import GONE, STOPPED
from mpips.launch import signs
from mpips.launch.signs import Terms
from mpips.launch.watch import Rank, Run, Signs, Watch
from mpips.session.metrics import Log

TIMEOUT_S = 60.0
WAITS = """
import sys, time
from pathlib import Path
from mpips.launch import signs
def waits_for_ever():
    time.sleep(600)
signs.begin(Path(sys.argv[1]), sys.argv[2])
waits_for_ever()
"""


@pytest.fixture
def job(tmp_path: Path) -> Signs:
    job = Signs(tmp_path / "1")
    job.begin(Terms())
    return job


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Path]:
    """This process as a rank, and the folder of the run that it is to begin."""
    yield tmp_path / "run"
    for number in (signs.DUMP, signs.DUMP_AFAR):
        faulthandler.unregister(number)
    while signs._files:
        signs._files.pop().close()


def test_a_folder_that_somebody_has_cleared(job: Signs, rank: Path) -> None:
    """The job goes on as far as it can, and another attempt has its folder again."""
    signs.begin(job.folder, "0")
    (job.folder / f"1{signs.LINES}").symlink_to("gone")  # since the folder was listed
    job.read()
    shutil.rmtree(job.folder.parent)
    job.read()
    assert "does not answer" in job.ask_for_stacks(os.getpid(), 0.0)
    job.end()
    job = Signs(job.folder.parent / "2")
    job.begin(Terms())
    assert (job.folder / signs.CURRENT).is_file()


def begin(
    job: Signs, out: Path, resume: str = "", log_every_s: float = 0.25, spares: Sequence[int] = ()
) -> None:
    signs.begin(job.folder, "0")
    (out / "checkpoints").mkdir(parents=True)
    (out / "metrics.jsonl").write_text('{"kind": "end", "step": 3, "reason": "SIGUSR1"}\n')
    signs.tell_run(out, resume, log_every_s, spares)


def test_nothing_is_told_without_a_supervisor(tmp_path: Path) -> None:
    signs.tell_run(tmp_path / "nowhere", "", 1.0)
    signs.tell_end(0)


def test_a_rank_without_the_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"/none on .*: No such file .*; on several nodes start"):
        signs.begin(tmp_path / "none", "0")


def test_what_a_rank_tells(job: Signs, rank: Path) -> None:
    begin(job, rank, resume="auto")
    job.read()
    assert [(r.name, r.host, r.pid) for r in job.ranks] == [("0", platform.node(), os.getpid())]
    assert job.ranks[0].trouble == ""
    assert job.alive() == [os.getpid()]
    (run,) = job.runs
    assert (run.out, run.resumes, run.is_done, run.saved_step) == (rank, True, False, -1)
    assert run.last() == (-1, ""), "what is there of an earlier start is not this one's"
    with (rank / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 7}\n\0\n{"kind": "warning", "step": null}\n')
        file.write('{"kind": "end", "step": 9, "reason": "epochs"}\n{"kind": "eva')
    assert run.last() == (9, "epochs")
    for step, whole in ((4, True), (8, False)):
        folder = rank / "checkpoints" / f"step-{step:012d}"
        folder.mkdir()
        (folder / ("index.h5" if whole else "shard-0000.h5.tmp")).touch()
    assert run.saved_step == 4
    signs.tell_end(85)
    job.read()
    job.read()
    assert (job.codes, len(job.ranks), len(job.runs)) == ({"0": 85}, 1, 1)
    moved = rank.rename(rank.with_name("moved"))
    (moved / "DONE").touch()
    assert (run.out, run.is_done) == (moved, True)
    job.close()


def test_the_end_of_a_run_in_a_folder_made_anew(job: Signs, rank: Path) -> None:
    begin(job, rank)
    job.read()
    (run,) = job.runs
    with (rank / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 1000, "loss": 0.25}\n')
    assert run.last() == (1000, "")
    shutil.rmtree(rank)
    assert run.last() == (1000, "")
    rank.mkdir()
    for step in (3, 7):  # as many bytes as were read, and more
        with (rank / "metrics.jsonl").open("a") as file:
            file.write(f'{{"kind": "end", "step": {step}, "reason": "SIGUSR1"}}\n')
        assert run.last() == (step, "SIGUSR1")
    run.close()


@pytest.mark.parametrize("shown", [None, 1, 2])
def test_a_file_of_another_host_that_is_seen_late(shown: int | None, tmp_path: Path) -> None:
    """What is of an earlier start stays that, though not all of it is there at first."""
    rows = [{"kind": "end", "step": step, "reason": "SIGTERM"} for step in (3, 5, 7)]
    lines = [json.dumps(row) + "\n" for row in rows]
    told = {"run": str(tmp_path), "resume": "auto", "log_every_s": 1, "spares": []}
    metrics = tmp_path / "metrics.jsonl"
    if shown is not None:
        metrics.write_text("".join(lines[:shown]))
    run = Run({**told, "size": len("".join(lines))})
    assert run.last() == (-1, "")
    metrics.write_text("".join(lines))
    assert run.last() == (-1, "")
    for step in (8, 9):
        with metrics.open("a") as file:
            file.write(f'{{"kind": "train", "step": {step}}}\n')
        assert run.last() == (step, "")
    run.close()


def test_a_job_gets_on_while_its_files_grow(job: Signs, rank: Path) -> None:
    watch = Watch(job, TIMEOUT_S, program=False, now=0)
    seen = [watch.look(now) for now in range(0, 60, 5)]
    begin(job, rank)  # which is a sign of life
    seen += [watch.look(now) for now in range(60, 115, 5)]
    with Log(rank / "metrics.jsonl", 0.0) as log:
        log.event("train", 1)  # as is this, though the disk be full
        log.event("train", 2)
    seen += [watch.look(now) for now in range(115, 170, 5)]
    shard = rank / "checkpoints" / "step-000000000004" / "shard-0000.h5.tmp"
    shard.parent.mkdir()
    shard.write_text("half")
    seen += [watch.look(now) for now in range(170, 225, 5)]
    assert not any(seen)
    assert watch.look(230) == f"nothing has happened in {rank} for 60 s"
    job.close()


def test_a_job_that_never_begins(job: Signs) -> None:
    watch = Watch(job, TIMEOUT_S, program=True, now=0)
    assert next(now for now in range(0, 100, 5) if watch.look(now)) == 60
    assert watch.look(65) == "nothing has happened before a run began for 65 s"


def test_a_supervisor_that_was_stopped_itself_judges_nothing(job: Signs) -> None:
    watch = Watch(job, TIMEOUT_S, program=False, now=0)
    assert watch.look(5) == watch.look(3600) == watch.look(3605) == ""


@pytest.mark.parametrize("program", [False, True])
def test_after_the_end_of_a_run(program: bool, job: Signs, rank: Path) -> None:
    """Nobody knows what a program does then; mpips.train is to end."""
    begin(job, rank)
    with (rank / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "end", "step": 9, "reason": "epochs"}\n')
    watch = Watch(job, TIMEOUT_S, program, now=0)
    assert any(watch.look(now) for now in range(0, 100, 5)) is not program
    job.close()


def test_lines_that_come_rarely_are_waited_for(job: Signs, rank: Path) -> None:
    begin(job, rank, log_every_s=100)
    watch = Watch(job, TIMEOUT_S, program=False, now=0)
    assert next(now for now in range(0, 300, 5) if watch.look(now)) == 200
    assert watch.quiet_s == 200
    job.close()


def test_processes_that_are_stopped_or_gone(job: Signs) -> None:
    """They are found though the job gets on; their stacks are shown, alike ones once."""
    command = [sys.executable, "-c", WAITS, str(job.folder)]
    children = [subprocess.Popen([*command, f"{k}"], env=environment()) for k in range(4)]
    try:
        while len(job.ranks) < 4:
            assert not any(child.poll() for child in children)
            job.read()
        assert [rank.trouble for rank in job.ranks] == [""] * 4
        os.kill(children[2].pid, signal.SIGSTOP)
        os.waitpid(children[2].pid, os.WUNTRACED)
        children[3].kill()
        while job.ranks[3].trouble != GONE:  # a zombie
            assert len(job.alive()) >= 3
        assert [rank.trouble for rank in job.ranks] == ["", "", STOPPED, GONE]
        other = Rank("9", platform.node(), children[0].pid, job.ranks[0].started - 1)
        assert other.trouble == GONE, "another process of that number"
        watch = Watch(job, TIMEOUT_S, program=False, now=0)
        for now in range(0, 60, 5):
            (job.folder / "9.jsonl").write_text("")
            assert watch.look(now) == ""
        assert watch.look(60) == f"{job.ranks[2]} is stopped for 60 s"
        told = job.ask_for_stacks(0, 10)
        assert told.startswith(f"{job.ranks[0]}, {job.ranks[1]}:\n")
        assert told.count("in waits_for_ever") == 1
        assert told.count("Current thread") == 1
        assert told.endswith(f"{job.ranks[2]}:\n  is stopped\n{job.ranks[3]}:\n  is gone\n")
    finally:
        for child in children:
            child.kill()
            child.wait(10)


def test_a_job_that_waits_for_a_rank_that_is_gone(job: Signs) -> None:
    """It is named, though it was missed some looks after the job had stood still."""
    watch = Watch(job, TIMEOUT_S, program=False, now=0)
    assert not any(watch.look(now) for now in range(0, 20, 2))
    job.ranks = [Rank("1", platform.node(), os.getpid(), 0)]  # another process of its number
    assert not any(watch.look(now) for now in range(20, 60, 2))
    assert watch.look(60) == f"{job.ranks[0]} is gone for 40 s"


@pytest.mark.parametrize("spares", [(), (1, 2)])
def test_a_rank_that_is_gone_where_mpi_ends_nobody(
    spares: Sequence[int], job: Signs, rank: Path
) -> None:
    """A run that does not go on without it, and does not end by itself, is to be ended."""
    begin(job, rank, spares=spares)
    job.ranks = [Rank("1", platform.node(), os.getpid(), 0)]  # another process of its number
    watch = Watch(job, TIMEOUT_S, program=False, now=0, survives=True)
    found = []
    for now in range(0, 40, 2):
        signs.beat()
        found.append(watch.look(now))
    assert any(found) is not bool(spares)
    assert spares or found.index(f"{job.ranks[-1]} is gone for 10 s") == 5
    job.close()


@pytest.mark.parametrize("others", [{}, {"2": 1}])
def test_a_rank_that_failed_where_mpi_ends_nobody(
    others: dict[str, int], job: Signs, rank: Path
) -> None:
    """Those that wait for it are to be ended, unless all have come to their end."""
    begin(job, rank)
    job.ranks = [Rank("2", platform.node(), os.getpid(), 0)]
    (job.folder / "0.jsonl").write_text("")
    for name, code in {"1": 1, **others}.items():
        (job.folder / f"{name}.jsonl").write_text(json.dumps({"code": code}) + "\n")
    assert signs.another_failed()
    watch = Watch(job, TIMEOUT_S, program=True, now=0, survives=True)
    job.codes = {"1": 1, **others}
    found = [watch.look(now) for now in range(2, 14, 2)]
    expected = "rank 1 has ended with exit code 1, and others have not"
    assert (expected in found) is not bool(others)
    job.close()


def test_a_file_of_a_rank_is_examined_once(
    job: Signs, rank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    class Counted(Tail):
        def __init__(self, path: Path) -> None:
            made.append(path)
            super().__init__(path)

    monkeypatch.setattr("mpips.launch.watch.Tail", Counted)
    signs.begin(job.folder, "0")
    for _ in range(3):
        job.read()
    assert made == [job.folder / f"0{signs.LINES}"]


def test_half_a_line_is_read_later(job: Signs) -> None:
    told = json.dumps({"host": "h", "pid": 1, "started": 2}) + "\n"
    for text, ranks in ((told[:9], 0), (told, 1)):
        (job.folder / "5.jsonl").write_text(text)
        job.read()
        assert len(job.ranks) == ranks
    assert job.ranks == [Rank("5", "h", 1, 2)]
    assert (job.ranks[0].trouble, job.alive()) == ("", []), "of another host nothing is known"


@pytest.mark.parametrize("timeout_s", [12.0, 0.0])
def test_ranks_know_what_the_supervisor_does(
    timeout_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it does not watch them, they end a job that stands still; without one, too."""
    monkeypatch.setattr(signs, "_files", [])
    assert not signs.timeout_s()
    assert signs.terms() is None
    job, terms = Signs(tmp_path / "signs"), Terms(timeout_s, 3, True, "why")
    job.begin(terms)
    with (job.folder / "0.jsonl").open("wb") as file:
        monkeypatch.setattr(signs, "_files", [file])
        assert signs.timeout_s() == timeout_s
        assert signs.terms() == terms
        job.end()
        assert signs.timeout_s(), "its attempt is over"


def test_a_checkpoint_is_removed_as_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the run, which keeps only the newest ones."""
    folder = tmp_path / "checkpoints"
    for name in ("step-1", "step-2"):
        (folder / name).mkdir(parents=True)
        (folder / name / "shard").write_text("four")
    listed = Path.iterdir

    def remove(path: Path) -> Iterator[Path]:
        if path.name == "step-1":
            shutil.rmtree(path)
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", remove)
    told = {"run": str(tmp_path), "size": 0, "resume": "auto", "log_every_s": 1, "spares": []}
    run = Run(told)
    assert run.saving() == [(str(folder / "step-2" / "shard"), 4)]
    run.close()
