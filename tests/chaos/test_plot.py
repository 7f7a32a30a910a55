"""The picture of runs that were disturbed."""

import re
from pathlib import Path

from tests.chaos.follow import Moment
from tests.chaos.plan import draw as draw_faults
from tests.chaos.plot import draw
from tests.chaos.run import Result, Struck

BEGUN = 100.0


def run(seed: int, *struck_at: float) -> Result:
    """Return a run of a loss that falls for 10 seconds, with a fault at each of some moments."""
    plan = draw_faults(seed, ["kill:job"] * len(struck_at), 0)
    struck = [
        Struck(fault, Moment(BEGUN + at, 0, 0), 0, ["mpirun"])
        for fault, at in zip(plan, struck_at, strict=True)
    ]
    curve = [(BEGUN + second, 1.0 / second) for second in range(1, 11)]
    return Result(seed, "", plan, struck, 1, 10.0, BEGUN, curve)


def test_faults_are_marked_on_the_loss(tmp_path: Path) -> None:
    path = tmp_path / "faults.svg"
    draw(run(1), [run(7, 0.5, 3.5, 6.0), run(8, 4.5)], path)
    texts = re.findall(r">([^<]+)</text>", path.read_text())
    assert texts.count("kill:job") == 3, "one came before there was a loss"
    assert {"no fault", "seed 7", "seed 8"} <= set(texts)
