"""Which tries of a job of SLURM count, and after which it gives up."""

from pathlib import Path

from mpips.launch.tries import Try, forget, gets_no_further, is_hurried, note


def ended(*steps: int) -> list[Try]:
    """Return tries that ended by themselves, each at a step."""
    return [Try("17", restart, step) for restart, step in enumerate(steps)]


def test_a_job_that_crashes_three_times_gets_no_further() -> None:
    assert gets_no_further(ended(-1, -1, -1))
    assert gets_no_further(ended(0, 7, 7, 7))
    assert not gets_no_further(ended(-1, -1))
    assert not gets_no_further(ended(-1, 0, 1))
    assert not gets_no_further(ended(5, 5, 6))


def test_what_ends_a_try_from_outside_does_not_count() -> None:
    """Such tries are not noted: those before and after them are next to each other."""
    crashes = [Try("17", restart, -1) for restart in (0, 4, 9)]
    assert not gets_no_further(crashes[:2])
    assert gets_no_further(crashes)


def test_a_job_is_hurried_in_three_starts_in_a_row() -> None:
    tries = [Try("17", restart, restart, hurried=True) for restart in range(3)]
    assert is_hurried(tries)
    assert not is_hurried(tries[1:])
    assert not gets_no_further(tries)
    assert not is_hurried([*tries[:2], Try("17", 2, 2)])
    assert not is_hurried([*tries[:2], Try("17", 3, 3, hurried=True)])
    assert is_hurried([*ended(0, 0), *tries])


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
