"""Gradients of several batches are added: equal to one batch as large, in every mode."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from references import TOLERANCE, serial_sync
from runs import (
    HERE,
    MODELS,
    Plan,
    assert_same_state,
    counting,
    final,
    names_asked,
    samples_file,
    shared_out,
    summary,
)

from mpips.config import Config
from mpips.config.command_line import parse_command_line
from mpips.config.jobfile import resolve
from mpips.datasets import open_dataset
from mpips.datasets.loader import Loader
from mpips.datasets.order import Order
from mpips.problems import load_problem
from mpips.problems.accumulate import Accumulator, ask_early, follow, submit, taken
from mpips.problems.base import initial_vector


class Asked:
    """Remote rows that are asked for, once each, as `mpips.tables.step_rows.RowsAtWork` does."""

    reads_ahead = True
    reads_early = False

    def __init__(self) -> None:
        self.lists: list[int] = []

    def ask_in_turn(self, lists: Any) -> None:
        found = [int(wanted["rows"][0]) for wanted in lists if wanted]
        self.lists += [each for each in found if each not in self.lists]


def test_rows_of_the_next_batch_are_asked_for() -> None:
    """Also behind one that was not there in time, and over the end of a step."""
    config = Config(batch_size=10)
    data, rows = open_dataset(config), Asked()
    problem = SimpleNamespace(wanted_rows=lambda batch: {"rows": batch.ids})
    job: Any = SimpleNamespace(config=config, problem=problem, rows=rows)
    order = Order(data.train.n, 10, 0, 0, shuffle=False)
    with Loader(data.train, order, "float32") as loader:
        submit(job, loader, (0, 0, 20))
        submit(job, loader, (0, 20, 30))
        batches = taken(job, loader, (0, 0, 20))
        assert next(batches).ids[0] == 0
        assert rows.lists == [0, 10]
        assert next(batches).ids[0] == 10
        assert rows.lists == [0, 10, 20]
        assert [batch.ids[0] for batch in taken(job, loader, (0, 20, 30))] == [20]
        assert rows.lists == [0, 10, 20]  # none is submitted behind it
        for part in ((0, 30, 40), (0, 40, 50)):
            submit(job, loader, part)
        assert [batch.ids[0] for batch in taken(job, loader, (0, 30, 40))] == [30]
        assert rows.lists == [0, 10, 20, 30, 40]
        for batch in taken(job, loader, (0, 40, 50)):
            assert batch.ids[0] == 40
            submit(job, loader, (0, 50, 60))  # comes while it is computed
        assert rows.lists == [0, 10, 20, 30, 40, 50]
        rows.reads_ahead, rows.reads_early = False, True  # when its step is read
        submit(job, loader, (0, 60, 70))
        assert [batch.ids[0] for batch in taken(job, loader, (0, 50, 60))] == [50]
        assert rows.lists[-1] == 50
        assert ask_early(job, loader)
        assert rows.lists[-1] == 60
        rows.reads_ahead, job.problem = True, None  # which says nothing
        submit(job, loader, (0, 70, 80))
        assert [batch.ids[0] for batch in taken(job, loader, (0, 60, 70))] == [60]
        assert ask_early(job, loader)
        assert loader.take().ids[0] == 70
        assert not ask_early(job, loader)  # it is not here


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("size", "accumulate"), [(8, 4), (7, 3), (1, 5), (32, 1)])
def test_gradient_is_that_of_one_large_batch(dtype: str, size: int, accumulate: int) -> None:
    """Steps of every length up to twice the full one, read in batches of at most `size`.

    Those above it are of a run in rounds, which is resumed in another mode.
    """
    config = Config(dtype=dtype, batch_size=size, accumulate=accumulate, hidden=(9,))
    data = open_dataset(config)
    problem = load_problem(config.problem, data.info, config)
    parts = {"config": config, "layout": problem.layout, "problem": problem, "info": data.info}
    parts["dataset"] = data
    job: Any = SimpleNamespace(**parts, dtype=np.dtype(dtype), delay=1.0, rows=None)
    accumulator, norm = Accumulator(job), np.linalg.norm
    params = problem.layout.views(initial_vector(problem, 0, job.dtype))
    flat, whole = np.zeros(problem.layout.size, dtype), np.zeros(problem.layout.size, dtype)
    out, expected = problem.layout.views(flat), problem.layout.views(whole)
    with Loader(data.train, Order(data.train.n, size, 0, 0), dtype) as loader:
        for end in range(1, 2 * config.step_size + 1):
            submit(job, loader, (0, 0, end))
            batches = taken(job, loader, (0, 0, end))
            loss = follow(problem, accumulator.gradient(params, batches, end, out, flat))
            assert loader.pending == 0
            loader.submit(0, 0, end)
            alone = problem.loss_and_grad(params, loader.take(), expected)
            assert loss == pytest.approx(alone, rel=TOLERANCE[dtype])
            assert norm(flat - whole) <= TOLERANCE[dtype] * norm(whole), end
    assert accumulator.compute_s > 0


# Whole runs ----------------------------------------------------------------------------------

FUNCTIONS = f"{HERE / 'problems' / 'functions.py'}"
N = 7 * 32 + 16  # the last step of an epoch has two batches instead of four
EPOCHS = 3
SYNC = (
    "--mode sync --optimizer momentum --lr 0.05 --hidden 24 --eval-every 0 --checkpoint-every 0 "
    "--epochs 2"
)
CASES = {  # ranks, options; an epoch is no multiple of any step
    "three workers": (3, "--batch-size 8 --accumulate 4 --dtype float64"),
    "servers": (4, "--batch-size 23 --accumulate 2 --servers 1 --dtype float32"),
    "nodes": (4, "--batch-size 10 --accumulate 3 --node-size 2 --dtype float64 --clip 0.2"),
    "allreduce": (2, "--batch-size 5 --accumulate 9 --reduce allreduce --dtype float32"),
}
ASYNC = {
    "near": (4, "--servers 2"),
    "remote": (5, "--servers 2 --node-size 2"),
    "one worker": (2, "--servers 1 --checkpoint-every 3steps"),
}
PARTS = ("--epochs 1000000", "--epochs 1000000 --resume", "--epochs 3 --resume")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Plan:
    """All runs of this module."""
    plan, asked = Plan(tmp_path_factory.mktemp("runs")), names_asked(request)
    for name in filter(asked.__contains__, CASES):
        ranks, options = CASES[name]
        plan.add(name, ranks, [*SYNC.split(), *options.split()])
    data = samples_file(plan.folder, N)
    size = ["--batch-size", "8", "--accumulate", "4"]
    for name in filter(asked.__contains__, ASYNC):
        ranks, options = ASYNC[name]
        words = [*counting(data, kind="MeanCounting"), "--lr", "32", *size]
        plan.add(name, ranks, [*words, *options.split(), "--epochs", str(EPOCHS)])
    if "test_stopped_run_ends_bitwise_equal" in asked:
        stopping = ["--problem", f"{MODELS}:StoppingMLP", "--mode", "sync", "--hidden", "8", *size]
        for k, words in enumerate(PARTS):
            last = k + 1 == len(PARTS)
            plan.add("parts", 3, [*stopping, *words.split()], code=0 if last else 85)
        plan.add("whole", 3, [*stopping, "--epochs", "3"])
        plan.add("whole", 3, ["--accumulate", "2", "--resume"], code=2)
    if "test_a_function_trains_as_the_class_of_the_same_formulas" in asked:
        for name, problem in (("function", f"{FUNCTIONS}:loss"), ("class", "softmax")):
            plan.add(name, 3, ["--problem", problem, "--mode", "sync", "--epochs", "2", *size])
    plan.run(200)
    return plan


@pytest.mark.launch
@pytest.mark.parametrize("name", shared_out(CASES, ["nodes"]))
def test_rounds_equal_a_serial_run(name: str, runs: Plan) -> None:
    ranks, options = CASES[name]
    config = resolve(parse_command_line([*SYNC.split(), *options.split()]).options)
    expected = serial_sync(config, ranks - (config.servers or 0))
    checkpoint = final(runs.out(name))
    found = checkpoint.layout.views(checkpoint.read_params())
    for key, array in expected.items():
        distance = np.linalg.norm(found[key] - array) / np.linalg.norm(array)
        assert distance <= TOLERANCE[config.dtype], key


@pytest.mark.launch
@pytest.mark.parametrize("name", shared_out(ASYNC, ["remote"], ()))
def test_each_batch_is_pushed_once_in_the_mean_of_its_step(name: str, runs: Plan) -> None:
    """With rate 32 a sample of a full step counts 1, one of the half step 2; exact numbers."""
    checkpoint = final(runs.out(name))
    order, expected = Order(N, 8, 0, 0), np.zeros(N)
    for epoch in range(EPOCHS):
        for begin in range(0, N, 32):
            end = min(begin + 32, N)
            expected[order.sample_ids(epoch, begin, end)] += 32 / (end - begin)
    arrays = checkpoint.layout.views(checkpoint.read_params())
    np.testing.assert_array_equal(arrays["counts"], expected)
    np.testing.assert_array_equal(arrays["updates"], 32.0 * EPOCHS * 8)
    assert summary(runs.out(name))["pushes_applied"] == EPOCHS * 8
    assert checkpoint.state["samples"] == EPOCHS * N


@pytest.mark.launch
@pytest.mark.one_mpi
def test_a_function_trains_as_the_class_of_the_same_formulas(runs: Plan) -> None:
    found, expected = (final(runs.out(name)) for name in ("function", "class"))
    assert found.layout == expected.layout
    np.testing.assert_array_equal(found.read_params(), expected.read_params())
    for name in ("accuracy", "samples"):  # the loss is the mean since the line before
        assert summary(runs.out("function"))[name] == summary(runs.out("class"))[name]


@pytest.mark.launch
@pytest.mark.one_mpi
def test_stopped_run_ends_bitwise_equal(runs: Plan) -> None:
    assert_same_state(final(runs.out("whole")), final(runs.out("parts")))
