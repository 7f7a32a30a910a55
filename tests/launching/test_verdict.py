"""What the supervisor refuses, and what comes after an attempt at a job, decided without one."""

from pathlib import Path
from typing import Any

import pytest

from mpips.launch import __main__ as command
from mpips.launch import mpirun, supervise
from mpips.launch.hosts import Host
from mpips.launch.order import Order
from mpips.launch.verdict import (
    Attempt,
    Try,
    gets_no_further,
    is_hurried,
    note,
    verdict,
    verdict_without_run,
    without_progress,
)

KILLED = Attempt(9, 1.0, runs=1, step=0)
MOVED = Attempt(85, runs=1, reason="SIGUSR1", step=4, asked_to_move=True)
SECOND, LATER = Attempt(9, runs=1, step=50), Attempt(9, runs=2, step=0)


def killed(*steps: int) -> list[Attempt]:
    """Return attempts that were killed, with what each has saved; -1: no run began."""
    return [Attempt(137, 1.0, runs=int(step >= 0), step=step) for step in steps]


def failed(*steps: int, code: int = 1) -> list[Attempt]:
    return [Attempt(code, 1.0, runs=int(step >= 0), step=step) for step in steps]


@pytest.mark.parametrize(
    ("attempts", "code"),
    [
        ([Attempt(139, runs=1, done=True)], 0),  # whatever the launcher says
        ([Attempt(-9, trouble="nothing has happened", runs=1, done=True)], 0),
        ([Attempt(85, runs=1, reason="SIGUSR1")], 85),
        ([Attempt(9, runs=1, reason="SIGTERM")], 85),
        ([Attempt(1, runs=1, reason="SIGTERM", step=5, told_step=5)], 85),  # of a program
        ([Attempt(1, runs=1, reason="SIGTERM", step=5, told_step=9)], 1),  # a full disk
        ([Attempt(85)], 85),  # asked before training began
        ([Attempt(2)], 2),
        ([Attempt(2, runs=1)], None),  # a restart might do: the folder was in use
        ([KILLED, Attempt(2)], None),
        ([KILLED, Attempt(2), Attempt(2)], 2),
        ([Attempt(1, runs=1, reason="diverged")], 1),
        ([Attempt(0)], 1),  # no run of mpips
        ([Attempt(0, runs=1)], None),  # a lost host, and a launcher that calls it an end
        ([Attempt(-9, trouble="rank 3 is stopped")], None),
        ([Attempt(9, runs=1, resumes=False)], 1),
        (failed(-1), None),
        (failed(-1, -1), 1),
        (failed(40, 40), 1),  # the same step again
        (failed(40, 90), None),
        ([Attempt(1, runs=1), *failed(0)], 1),  # the first one was too quick to save its beginning
        ([*killed(40), *failed(40)], None),  # an exception that came once
        (killed(-1, -1), None),
        (killed(-1, -1, -1), 1),
        (killed(40, 40, 40), 1),
        (killed(40, 40, -1), 1),
        (killed(40, 40, 41), None),
        (killed(10, 20, 20, 30, 30), None),
        (killed(10, 20, 30, 40, 50, 60), 1),  # started again five times
        ([MOVED] * 7, None),  # moves are no restarts
        ([*[MOVED] * 3, *killed(10, 20, 30, 40, 50)], None),
        ([*[MOVED] * 3, *killed(10, 20, 30, 40, 50, 60)], 1),
        ([Attempt(1, runs=1, step=4, asked_to_move=True)], None),
        ([Attempt(1, 0, "", 1, False, "SIGUSR1", 4, 9, asked_to_move=True)], None),
        ([Attempt(0, runs=1, done=True, asked_to_move=True)], 0),  # it had come to its end
        ([SECOND, LATER, LATER], None),  # a run after another begins at step 0
        ([SECOND, LATER, LATER, LATER], 1),
    ],
)
def test_the_verdict(attempts: list[Attempt], code: int | None) -> None:
    found = verdict(attempts, 5)
    assert (found and found.code) == code


def test_attempts_without_progress() -> None:
    """By which the pause before the next one grows."""
    counts = {(-1,): 0, (-1, -1): 1, (-1, 0): 0, (5, 5, 5): 2, (5, 5, 9): 0, (5, 9, 5, 7): 2}
    for steps, count in counts.items():
        assert without_progress([one.got for one in killed(*steps)]) == count


def test_a_job_that_begins_no_run() -> None:
    """It ends with what its ranks told, once they have got as far as that."""
    told, died = Attempt(3, reported=True), Attempt(134)
    for attempts, asked, code in (
        ([Attempt(0, reported=True)], "", 0),
        ([told], "", 3),
        ([died], "", None),
        ([died, told], "", 3),
        ([died, died], "", 1),
        ([Attempt(-9, trouble="it hangs")], "", None),
        ([Attempt(138)], "SIGUSR1", 85),
    ):
        found = verdict_without_run(attempts, asked)
        assert (found and found.code) == code


@pytest.mark.parametrize("runs", [0, 1])
def test_a_job_that_was_asked_to_end(runs: int) -> None:
    """It is not started again; it was saved if it says so, or if there was nothing to save."""
    last = Attempt(137, runs=runs, step=7)
    found = verdict([*killed(5), last], 5, "SIGINT")
    assert found is not None
    assert found.code == (1 if runs else 85)
    assert found.why.startswith("SIGINT")
    assert verdict([Attempt(85, runs=runs)], 5, "SIGINT") == verdict([Attempt(85, runs=runs)], 5)


@pytest.mark.parametrize(
    ("noted", "no_further", "hurried"),
    [
        ("0:-1 1:-1 2:-1", True, False),
        ("0:0 1:7 2:7 3:7", True, False),
        ("0:-1 1:-1", False, False),
        ("0:-1 1:0 2:1", False, False),
        ("0:5 1:5 2:6", False, False),
        ("0:-1 4:-1", False, False),  # what ends a try from outside is not noted
        ("0:-1 4:-1 9:-1", True, False),
        ("0:0! 1:1! 2:2!", False, True),
        ("1:1! 2:2!", False, False),
        ("0:0! 1:1! 2:2", False, False),
        ("0:0! 1:1! 3:3!", False, False),  # not in a row
        ("0:0 1:0 2:0! 3:1! 4:2!", False, True),
    ],
)
def test_when_a_job_gives_up(noted: str, no_further: bool, hurried: bool) -> None:
    """After tries, given as ``restart:step``, with ``!`` behind those that were hurried."""
    found = [
        Try("17", *map(int, word.strip("!").split(":")), word.endswith("!"))
        for word in noted.split()
    ]
    assert (gets_no_further(found), is_hurried(found)) == (no_further, hurried)


def test_tries_are_noted_by_job(tmp_path: Path) -> None:
    """Also where there is no run yet; a line that was cut, or is of another job, does not count."""
    run, file = tmp_path / "runs" / "17", tmp_path / "runs" / "17.tries"
    one, other = Try("17_2", 0, -1), Try("18", 0, 4, hurried=True)
    assert note(run, one) == [one]
    assert note(run, other) == [other]
    with open(file, "a") as cut:
        cut.write('{"job": "17_2", "rest\n')
    again = Try("17_2", 1, -1)
    assert note(run, again) == [one, again]
    (tmp_path / "none").touch()
    assert note(tmp_path / "none" / "run", one) == [one]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--", "neither -n nor --hosts, expected the number of ranks; give -n"),
        ("-n 3 --elastic --", "--elastic without --hosts, expected both; name the hosts"),
        ("-n 3 --rsh ssh --", "--rsh without --hosts, expected both; name the hosts"),
        ("--hosts a:2,b:2 --elastic 5 --", "--elastic 5, expected 1 to 4 ranks"),
        ("--hosts a:2 --rsh ssssh --", "--rsh 'ssssh', expected a program on PATH"),
        ("-n 3 --mpirun 'mpirun --", '--mpirun: invalid split value: "\'mpirun"'),
        ("-n 3 --epochs 3", "unrecognized arguments: --epochs 3"),
        ("-n 3", "no --, expected -- before the options of mpips.train, or a program"),
        ("-n 0 --", "-n 0, expected an integer >= 1"),
        ("-n 3 --restarts -1 --", "--restarts -1, expected an integer >= 0"),
        ("-n 3 --timeout nan --", "--timeout nan, expected seconds >= 1, or 0"),
        ("-n 3 -- --epoch 3", "unknown option --epoch, expected one of those that --help lists"),
        ("-n 3 -- -m", "unknown option -m, expected one of those that --help lists"),
        ("-n 3 -- none.py", "no program none.py, expected a file"),
        ("-n 3 -- --help", "--help starts no run, expected options of a run"),
    ],
)
def test_what_is_refused(words: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(words.split()) == 2
    told = capsys.readouterr().err
    assert error in told
    assert told.startswith("mpips: ")


ON = {"hosts": [Host("a", 3)]}


@pytest.mark.parametrize(
    ("words", "order", "is_open_mpi", "why"),
    [
        ("--mode async", {}, True, ""),
        ("--mode sync", {"survives": True}, True, "its mode needs all ranks"),
        ("--mode sync --on-death shrink", {}, True, ""),
        ("line.py", {"survives": True}, True, ""),
        ("line.py", {}, True, "it is a program without --ft"),
        ("line.py", {}, False, "this MPI ends all ranks"),
        ("", {"launcher": ["mpirun"]}, True, "with --mpirun a death ends all ranks"),
        ("", ON, True, ""),
        ("", {**ON, "launcher": ["srun"]}, True, "srun ends all ranks"),
        ("--epoch 3", {}, True, "its mode needs all ranks"),  # it is refused
    ],
)
def test_which_jobs_go_on_without_a_rank(
    words: str, order: dict[str, Any], is_open_mpi: bool, why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(mpirun, "is_open_mpi", lambda *_: is_open_mpi)
    assert supervise.why_all_end(Order(3, words.split(), **order)) == why


@pytest.mark.parametrize(
    ("command", "ft", "why"),
    [
        ("true", False, ""),
        ("false", True, "this Open MPI ends all ranks"),
        ("sleep 60", False, "mpirun hung twice as it was tried"),
        ("test -e hung || { touch hung; sleep 60; }", False, ""),  # once
        (f"echo {mpirun.FABRICS}mlx5_0", False, "InfiniBand aside to go on without it, which --ft"),
        (f"echo {mpirun.FABRICS}mlx5_0", True, ""),
    ],
)
def test_what_hosts_allow_is_tried_there(
    command: str, ft: bool, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mpirun, "TRIES_S", (0.3, 0.6))
    found = mpirun.refusal(["sh", "-c", command], 3, ft)
    assert why in found
    assert bool(found) == bool(why)
