"""What comes after an attempt at a job, or after a try of SLURM, decided without one."""

from pathlib import Path

import pytest

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
        ([Attempt(0, runs=1, done=True)], 0),
        ([Attempt(139, runs=1, done=True)], 0),  # whatever the launcher says
        ([Attempt(-9, trouble="nothing has happened", runs=1, done=True)], 0),
        ([Attempt(85, runs=1, reason="SIGUSR1")], 85),
        ([Attempt(9, runs=1, reason="SIGTERM")], 85),
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
        (failed(40), None),
        (failed(40, 40), 1),  # the same step again
        (failed(40, 90), None),
        ([Attempt(1, runs=1), *failed(0)], 1),  # the first one was too quick to save its beginning
        ([*killed(40), *failed(40)], None),  # an exception that came once
        (killed(-1, -1), None),
        (killed(-1, -1, -1), 1),
        (killed(40, 40), None),
        (killed(40, 40, 40), 1),
        (killed(40, 40, -1), 1),
        (killed(40, 40, 41), None),
        (killed(10, 20, 20, 30, 30), None),
        (killed(10, 20, 30, 40, 50, 60), 1),  # started again five times
        ([MOVED] * 7, None),  # moves are no restarts
        ([*[MOVED] * 3, *killed(10, 20, 30, 40, 50)], None),
        ([*[MOVED] * 3, *killed(10, 20, 30, 40, 50, 60)], 1),
        ([Attempt(1, runs=1, step=4, asked_to_move=True)], None),
        ([Attempt(0, runs=1, done=True, asked_to_move=True)], 0),  # it had come to its end
        ([SECOND, LATER, LATER], None),  # a run after another begins at step 0
        ([SECOND, LATER, LATER, LATER], 1),
    ],
)
def test_the_verdict(attempts: list[Attempt], code: int | None) -> None:
    found = verdict(attempts, 5)
    assert (found and found.code) == code


@pytest.mark.parametrize(
    ("steps", "count"),
    [((-1,), 0), ((-1, -1), 1), ((-1, 0), 0), ((5, 5, 5), 2), ((5, 5, 9), 0), ((5, 9, 5, 7), 2)],
)
def test_attempts_without_progress(steps: tuple[int, ...], count: int) -> None:
    """By which the pause before the next one grows."""
    assert without_progress([one.got for one in killed(*steps)]) == count


@pytest.mark.parametrize(
    ("attempts", "asked", "code"),
    [
        ([Attempt(0, reported=True)], "", 0),
        ([Attempt(3, reported=True)], "", 3),
        ([Attempt(134)], "", None),
        ([Attempt(134), Attempt(3, reported=True)], "", 3),
        ([Attempt(134), Attempt(134)], "", 1),
        ([Attempt(-9, trouble="it hangs")], "", None),
        ([Attempt(138)], "SIGUSR1", 85),
    ],
)
def test_a_job_that_begins_no_run(attempts: list[Attempt], asked: str, code: int | None) -> None:
    """It ends with what its ranks told, once they have got as far as that."""
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


def tries(text: str) -> list[Try]:
    """Return tries, given as ``restart:step``, with ``!`` behind those that were hurried."""
    pairs = ((word.strip("!").split(":"), word.endswith("!")) for word in text.split())
    return [Try("17", int(restart), int(step), hurried) for (restart, step), hurried in pairs]


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
    found = tries(noted)
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
