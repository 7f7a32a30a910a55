"""What is drawn from a seed."""

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
