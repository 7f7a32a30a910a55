"""Which tries of a job of SLURM count, and after which it gives up."""

from pathlib import Path

import pytest

from mpips.launch.tries import Try, forget, gets_no_further, is_hurried, note


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
    forget(run)
    assert not list(run.parent.iterdir())
    (tmp_path / "none").touch()
    assert note(tmp_path / "none" / "run", one) == [one]
    (tmp_path / "kept.tries").mkdir()
    forget(tmp_path / "kept")
