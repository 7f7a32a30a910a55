"""A schedule that ends with the run is where its samples are, in whatever world it goes on."""

import numpy as np
import pytest
from launch import ROOT
from runs import Plan, final, names_asked, thinned

from mpips.checkpoint import list_checkpoints, open_checkpoint

pytestmark = pytest.mark.launch

WORLDS = {  # ranks and options of each part of a run
    "more ranks": ((2, "--mode sync"), (6, "--mode sync")),
    "fewer ranks": ((6, "--mode sync"), (2, "--mode sync")),
    "another mode": ((4, "--mode async"), (4, "--mode sync --servers 0")),
    "and again": ((4, "--mode async"), (4, "--mode sync --servers 0"), (6, "--mode sync")),
    "backup": ((4, "--mode ssp --servers 1"), (4, "--mode sync --backup-workers 1")),
}
STEPS = {
    "fewer ranks, steps": ((4, "--mode sync --steps 20"), (2, "--mode sync --steps 30")),
    "more ranks, steps": ((2, "--mode sync --steps 20"), (6, "--mode sync --steps 30")),
    "servers, steps": ((4, "--mode async --steps 20"), (5, "--mode sync --servers 0 --steps 40")),
}
QUICK = ("fewer ranks", "servers, steps")
EPOCHS = 2  # of each part


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Plan:
    made = Plan(tmp_path_factory.mktemp("schedules"))
    words = [str(ROOT / "jobs/digits-sync.toml"), "--schedule", "cosine", "--eval-every", "0"]
    for name in filter(names_asked(request).__contains__, WORLDS | STEPS):
        parts = (WORLDS | STEPS)[name]
        for k, (ranks, options) in enumerate(parts):
            start = ["--resume"] if k else [*words, "--keep", "9", "--checkpoint-every", "0"]
            epochs = ["--epochs", str(EPOCHS * (k + 1))]
            length = [] if name in STEPS else epochs
            made.add(name, ranks, [*start, *options.split(), *length])
    made.run(timeout_s=200)
    return made


@pytest.mark.parametrize("name", thinned([*WORLDS, *STEPS], QUICK))
def test_training_goes_on(name: str, plan: Plan) -> None:
    """At rate 0 nothing would change."""
    before, last = map(open_checkpoint, list_checkpoints(plan.out(name))[-2:])
    assert last.path == final(plan.out(name)).path
    assert before.state["samples"] < last.state["samples"]
    assert np.abs(last.read_params() - before.read_params()).max() > 1e-3


@pytest.mark.parametrize("name", thinned([n for n in WORLDS if n != "backup"], QUICK[:1]))
def test_the_schedule_ends_with_the_run(name: str, plan: Plan) -> None:
    """But for the last batch of an epoch; with backup workers it depends on who is late."""
    last = final(plan.out(name)).state
    each = last["schedule"]["samples_per_update"]
    per_epoch = -(-last["n_train"] // each)
    epochs = EPOCHS * len(WORLDS[name])
    assert last["schedule"]["position"] == pytest.approx(epochs * per_epoch, abs=epochs)


@pytest.mark.parametrize("name", thinned(STEPS, QUICK[1:]))
def test_a_schedule_over_steps_ends_with_them(name: str, plan: Plan) -> None:
    last = final(plan.out(name)).state
    assert last["schedule"]["position"] == max(last["allocator"]["clocks"])
    assert set(last["allocator"]["clocks"]) == {int(STEPS[name][-1][1].split()[-1])}
