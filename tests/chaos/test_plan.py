"""What is drawn from a seed, and what is refused."""

import pytest

from mpips.config.command_line import load
from tests.chaos.__main__ import main
from tests.chaos.builtin import MODES, options
from tests.chaos.plan import FAULTS, STARTING, draw

SEEDS = range(300)


def test_a_plan_follows_from_its_seed() -> None:
    plans = [draw(seed, list(FAULTS)) for seed in SEEDS]
    assert plans == [draw(seed, list(FAULTS)) for seed in SEEDS]
    assert len({tuple(plan) for plan in plans}) == len(plans)
    assert all(sorted(fault.name for fault in plan) == sorted(FAULTS) for plan in plans)


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
@pytest.mark.parametrize("ranks", [3, 7])
def test_a_built_in_job_can_be(mode: str, ranks: int) -> None:
    """The more hangs there are, the longer it is; rounds are whole."""
    kills, stops = (draw(1, [name] * 3) for name in ("kill:worker", "stop:worker"))
    jobs = [load(options(mode, ranks, plan, 20.0)) for plan in (kills, stops)]
    assert jobs[0].epochs < jobs[1].epochs
    for config in jobs:
        n_train = 1797 - round(config.test_fraction * 1797)
        workers = ranks - (config.servers or 0)
        assert not config.in_rounds or n_train % (config.unit_size * workers) == 0


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--faults kill:workers", "unknown fault 'kill:workers', expected one of disk:full, "),
        ("--modes async,snyc", "unknown built-in job 'snyc', expected one of async, "),
        ("--modes sync -- --epochs 3", "--modes and a job, expected one of the two"),
        ("--runs 0", "--runs 0, expected a number >= 1"),
        ("-n 1", "mode=async in a world of 1 rank"),
        ("-- --out here", "--out, expected options without it; say by --folder where runs go"),
        (f"-- {__file__}", "a program without {out}, expected {out} among its words"),
    ],
)
def test_what_is_refused(words: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert error in capsys.readouterr().err
