"""Elastic averaging against a run without any MPI, and within bounds where workers race."""

import numpy as np
import pytest
from references import TOLERANCE, serial_easgd
from runs import Plan, counting, final, names_asked, samples_file, shared_out, summary

from mpips.config.command_line import parse_command_line
from mpips.config.jobfile import resolve

JOB = "--mode easgd --hidden 24 --eval-every 0 --checkpoint-every 0"
ALONE = {  # ranks, options, epochs of each part; one worker, so that nothing races
    "sgd": (2, "--optimizer sgd --tau 4 --batch-size 16 --dtype float64", (2,)),
    "adam": (3, "--optimizer adam --tau 5 --servers 2 --elastic-rate 0.3 --dtype float64", (2,)),
    "single": (2, "--optimizer momentum --lr 0.02 --tau 3 --clip 0.5", (2,)),
    "accumulated": (
        2,
        "--optimizer momentum --lr 0.02 --tau 3 --accumulate 2 --schedule cosine --dtype float64",
        (2,),
    ),
    "resumed": (2, "--optimizer adam --tau 6 --batch-size 8 --dtype float64", (1, 3)),
}
N, EPOCHS, LONG = 230, 3, 12  # LONG: more than the stops of a run take
COUNTED = {
    "near": (5, "--servers 2 --tau 3 --batch-size 4"),
    "remote": (5, "--servers 2 --tau 2 --batch-size 8 --node-size 2"),
    "carried": (6, "--servers 2 --tau 2 --batch-size 4 --node-size 3 --node-aggregation"),
    "consistent": (4, "--servers 1 --tau 4 --batch-size 4 --read consistent --node-size 2"),
    "private": (3, "--servers 1 --tau 4 --batch-size 4 --window private"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Plan:
    """All runs of this module."""
    plan, asked = Plan(tmp_path_factory.mktemp("runs")), names_asked(request)
    for name in filter(asked.__contains__, ALONE):
        ranks, options, epochs = ALONE[name]
        for k, last in enumerate(epochs):
            more = ["--epochs", str(last), *["--resume"] * bool(k)]
            plan.add(name, ranks, [*JOB.split(), *options.split(), *more])
    data = samples_file(plan.folder, N)
    for name in filter(asked.__contains__, COUNTED):
        ranks, options = COUNTED[name]
        words = [*counting(data), "--mode", "easgd", "--checkpoint-every", "3steps"]
        plan.add(name, ranks, [*words, *options.split(), "--epochs", str(EPOCHS)])
    stopping = [*counting(data, kind="StoppingCounting"), "--mode", "easgd", "--tau", "2"]
    for k, (ranks, servers) in enumerate(((4, 1), (6, 3), (5, 2))):
        words = ["--servers", str(servers), "--batch-size", "4", *["--resume"] * bool(k)]
        last = ["--epochs", str(LONG) if k == 2 else "1000000"]
        plan.add("stopped", ranks, [*stopping, *words, *last], 0 if k == 2 else 85)
    plan.run(250)
    return plan


@pytest.mark.launch
@pytest.mark.parametrize("name", shared_out(ALONE, ["resumed"]))
def test_one_worker_equals_a_serial_run(name: str, runs: Plan) -> None:
    _, options, epochs = ALONE[name]
    config = resolve(parse_command_line([*JOB.split(), *options.split()]).options)
    expected = serial_easgd(config, epochs[-1])
    checkpoint = final(runs.out(name))
    assert checkpoint.slot_names == ()
    found = checkpoint.layout.views(checkpoint.read_params())
    # Adam divides by roots that may be tiny, which enlarges what was rounded.
    tolerance = TOLERANCE[config.dtype] * (10 if config.optimizer == "adam" else 2)
    for key, array in expected.items():
        assert np.linalg.norm(found[key] - array) <= tolerance * np.linalg.norm(array), key


@pytest.mark.launch
@pytest.mark.parametrize("name", shared_out(COUNTED, ["carried"]))
def test_the_centre_is_drawn_by_every_batch_and_not_beyond(name: str, runs: Plan) -> None:
    """Centre and replicas together have counted each sample 3 times, each of them some of it."""
    checkpoint = final(runs.out(name))
    arrays = checkpoint.layout.views(checkpoint.read_params())
    assert (arrays["counts"] > 0).all()
    assert (arrays["counts"] < EPOCHS).all()
    found = summary(runs.out(name))
    options = resolve(parse_command_line(["--mode", "easgd", *COUNTED[name][1].split()]).options)
    exchanges = EPOCHS * -(-N // (options.batch_size * options.tau))
    assert found["pushes_sent"] == found["pushes_applied"] == exchanges == found["global_step"]
    assert sum(w["steps"] for w in found["per_worker"]) == EPOCHS * -(-N // options.batch_size)
    assert found["samples"] == sum(w["samples"] for w in found["per_worker"]) == EPOCHS * N
    assert (arrays["updates"] > 0).all()
    assert (arrays["updates"] < sum(w["steps"] for w in found["per_worker"])).all()


@pytest.mark.launch
def test_stopped_run_hands_out_each_batch_once(runs: Plan) -> None:
    checkpoint = final(runs.out("stopped"))
    assert checkpoint.state["allocator"]["cursor"] == [LONG, 0]
    assert checkpoint.state["allocator"]["pending"] == []
    assert checkpoint.state["samples"] == LONG * N
    counts = checkpoint.layout.views(checkpoint.read_params())["counts"]
    assert (counts > 0).all()
    assert (counts < LONG).all()
