"""What is drawn from a seed, and what is refused."""

import pytest

from mpips.config.command_line import load
from mpips.launch.supervise import Order
from tests.chaos.__main__ import main
from tests.chaos.builtin import MODES, options
from tests.chaos.plan import FAULTS, STARTING, draw, parse_faults
from tests.chaos.run import _options

SEEDS = range(300)


def test_a_plan_follows_from_its_seed() -> None:
    plans = [draw(seed, list(FAULTS)) for seed in SEEDS]
    assert plans == [draw(seed, list(FAULTS)) for seed in SEEDS]
    assert len({tuple(plan) for plan in plans}) == len(plans)
    assert all(sorted(fault.name for fault in plan) == sorted(FAULTS) for plan in plans)


def test_some_are_drawn() -> None:
    plans = [draw(seed, list(FAULTS), most=4) for seed in SEEDS]
    assert {len(plan) for plan in plans} == {1, 2, 3, 4}
    assert {fault.name for plan in plans for fault in plan} == set(FAULTS)
    assert [fault.name for fault in draw(7, ["kill:all"] * 3)] == ["kill:all"] * 3


def test_faults_come_at_starts_where_the_supervisor_is_to_go_on() -> None:
    """It gives up after three attempts in a row that save nothing, or two that fail alike."""
    plans = [draw(seed, list(FAULTS)) for seed in SEEDS]
    pairs = [pair for plan in plans for pair in zip([None, *plan], plan, strict=False)]
    starting = [(before, fault) for before, fault in pairs if fault.moment == STARTING]
    assert any(before is None for before, _ in starting)
    for before, fault in starting:
        assert fault.action in ("kill", "stop")
        assert before is None or (before.ends_job and before.moment != STARTING)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [3, 4, 7])
def test_a_built_in_job_can_be(mode: str, ranks: int) -> None:
    """The more hangs there are, the longer it is; rounds are whole."""
    kills, stops = (draw(1, [name] * 3) for name in ("kill:worker", "stop:worker"))
    jobs = [load(options(mode, ranks, plan, 20.0)) for plan in (kills, stops)]
    assert jobs[0].epochs < jobs[1].epochs
    for config in jobs:
        n_train = 1797 - round(config.test_fraction * 1797)
        assert not config.in_rounds or n_train % (config.unit_size * ranks) == 0


def test_a_list_of_faults() -> None:
    assert parse_faults("kill:job, disk:full,,kill:job") == ["kill:job", "disk:full", "kill:job"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--faults kill:workers", "unknown fault 'kill:workers', expected one of disk:full, "),
        ("--faults ,", "--faults ',', expected some of kill:worker, "),
        ("--modes async,snyc", "unknown built-in job 'snyc', expected one of async, "),
        ("--modes sync -- --epochs 3", "--modes and a job, expected one of the two"),
        ("--runs 0", "--runs 0, expected a number >= 1"),
        ("--limit nan", "--limit nan, expected a number >= 1"),
        ("-n 0", "-n 0, expected an integer >= 1"),
        ("-n 1", "mode=async in a world of 1 rank"),
        ("-- --out here", "--out, expected options without it; say by --folder where runs go"),
        ("-- --epoch 3", "unknown option --epoch"),
        ("-- none.py", "no program none.py"),
        (f"-- {__file__}", "a program without {out}, expected {out} among its words"),
    ],
)
def test_what_is_refused(words: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "fault", "asked", "survives"),
    [
        ("--mode async", "exception:worker", False, True),
        ("--mode async", "kill:worker", False, False),
        ("--mode sync", "exception:worker", False, False),
        ("line.py {out}", "exception:worker", False, False),
        ("line.py {out}", "kill:worker", True, True),
    ],
)
def test_jobs_that_raise_go_on_without_ranks(
    words: str, fault: str, asked: bool, survives: bool
) -> None:
    """The supervisor takes such a job for a program; of others it knows by itself."""
    order = Order(3, words.split(), survives=asked)
    assert ("--ft" in _options(order, draw(7, [fault]))) is survives
