"""Modules of PyTorch from the command line: their losses and gradients, and jobs on all data."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from runs import HERE, Plan, summary

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from mpips.config.command_line import load  # noqa: E402
from mpips.datasets import Batch, DataInfo  # noqa: E402
from mpips.errors import UserError  # noqa: E402
from mpips.problems import load_problem  # noqa: E402
from mpips.problems.gradient_check import check_gradient  # noqa: E402

MODULES = str(HERE / "problems" / "modules.py")


def make(name: str, dtype: str = "float32", **fields: Any) -> Any:
    """Return a module as a problem of made data: 5 inputs, 4 classes."""
    base = {"name": "made", "n_train": 64, "n_test": 16, "x_shape": (5,), "y_shape": ()}
    data = DataInfo(**{**base, "classes": 4, "source": "made.npz", **fields})
    config = SimpleNamespace(problem=name, dtype=dtype, seed=3)
    return load_problem(f"{MODULES}:{name}", data, config)  # type: ignore[arg-type]


def given(name: str, dtype: str = "float32", **fields: Any) -> tuple[Any, ...]:
    """Return a problem, its parameters, which can only be read, a gradient of NaN, and a batch."""
    problem, rng = make(name, dtype, **fields), np.random.default_rng(2)
    vector, grad = np.zeros(problem.layout.size, dtype), np.full(problem.layout.size, np.nan, dtype)
    for key, view in problem.layout.views(vector).items():
        view[...] = problem.init(np.random.default_rng(1))[key]
    x = rng.normal(size=(12, *problem.data.x_shape)).astype(dtype)
    x.flags.writeable = False
    real = rng.normal(size=(12, *problem.data.y_shape)).astype(dtype)
    y = rng.integers(0, 4, 12) if problem.data.classes else real
    params = problem.layout.views(vector, writable=False)
    return problem, params, problem.layout.views(grad), Batch(x, y, np.arange(12))


CASES = {  # module, data, what its loss is
    "classes": ("Affine", {}, lambda out, y: F.cross_entropy(out, y)),
    "images": ("Affine", {"x_shape": (3, 2)}, lambda out, y: F.cross_entropy(out, y)),
    "real": ("Affine", {"classes": None}, lambda out, y: ((out[:, 0] - y) ** 2).mean()),
    "matrix": (
        "Affine", {"classes": None, "y_shape": (2, 3)},
        lambda out, y: ((out - y.flatten(1)) ** 2).mean(),
    ),
    "own": ("Absolute", {"classes": None}, lambda out, y: (out[:, 0] - y).abs().mean()),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.filterwarnings("error")
def test_loss_and_gradient_are_those_of_torch(case: str, dtype: str) -> None:
    name, fields, expected_loss = CASES[case]
    problem, params, out, batch = given(name, dtype, **fields)
    assert all(array.dtype == dtype for array in params.values())
    weights = {k: torch.tensor(v, requires_grad=True) for k, v in params.items()}
    x = torch.tensor(batch.x).flatten(1)
    logits = x @ weights["out.weight"].T + weights["out.bias"]
    expected = expected_loss(logits, torch.tensor(batch.y))
    expected.backward()
    value = float(expected.detach())
    for _ in range(2):  # nothing is left of the first time
        loss = problem.loss_and_grad(params, batch, out)
        assert abs(loss - value) < 1e-6
        for key in ("out.weight", "out.bias"):
            np.testing.assert_allclose(out[key], weights[key].grad.numpy(), atol=1e-6)
    if name == "Absolute":
        assert params.keys() == {"out.weight", "out.bias", "unused"}
        np.testing.assert_array_equal(out["unused"], 0)
    found = problem.evaluate(params, batch)
    assert abs(found["loss"] - value) < 1e-6
    assert ("accuracy" in found) == (fields.get("classes", 4) == 4)
    if "accuracy" in found:
        right = logits.argmax(1).numpy() == batch.y
        assert found["accuracy"] == pytest.approx(right.mean())


def test_parameters_are_not_copied() -> None:
    problem, params, out, batch = given("Affine")
    assert make("Affine").model.out.weight.numel() == 0, "a server needs none"
    problem.loss_and_grad(params, batch, out)
    address = problem.model.out.weight.data_ptr()
    assert address == params["out.weight"].__array_interface__["data"][0]
    problem.evaluate({k: v.copy() for k, v in params.items()}, batch)
    assert problem.model.out.weight.data_ptr() == address
    assert problem.model.training


def test_every_rank_makes_the_same_start() -> None:
    one, two = make("Affine"), make("Affine")
    torch.rand(7)
    for seed in (0, 1):
        a, b = (p.init(np.random.default_rng(seed)) for p in (one, two))
        assert all(np.array_equal(a[name], b[name]) for name in one.layout.names)
    assert not np.array_equal(a["out.weight"], one.init(np.random.default_rng(0))["out.weight"])


def test_a_loss_without_a_forward() -> None:
    problem, params, out, batch = given("Headless")
    assert problem.loss_and_grad(params, batch, out) > 0
    assert list(problem.evaluate(params, batch)) == ["loss"]


REFUSED: dict[str, str] = {
    "Affine": "Affine' with the sparse samples of dataset 'made', expected dense ones; leave out",
    "TwoArguments": r"TwoArguments raised TypeError: .*, expected a class made by CLASS\(\) or CL",
    "OtherInputs": r"raised RuntimeError: mat1 and mat2 .*, and a forward of inputs \(n, 5\); se",
    "OtherOutputs": r"OtherOutputs that makes \(2, 3\) of inputs of shape \(2, 5\), expected \(2",
    "LossModule": r"LossModule\.loss of type CrossEntropyLoss, expected a method loss\(self, x, y",
    "LossEach": r"returned a tensor of shape \(2,\), expected a scalar tensor that depends on the",
    "LossNumber": r"loss of LossNumber that returned a \d.*, expected a scalar tensor",
    "Nothing": "a model without a parameter that requires a gradient, expected at least one",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be(name: str) -> None:
    with pytest.raises(UserError, match=REFUSED[name]):
        make(name, sparse=name == "Affine")


def test_running_means_have_no_gradient_to_check() -> None:
    words = ["--problem", f"{MODULES}:Normed", "--dataset", "spirals", "--batch-size", "16"]
    text, error = check_gradient(load(words), 100_000_000)
    assert error is None, text
    arrays = [line.split()[0] for line in text.splitlines()[2:-1]]
    assert arrays == ["out.weight", "out.bias", "norm.weight", "norm.bias"]
    assert text.endswith("the gradient is right\n")


@pytest.mark.launch
@pytest.mark.one_mpi
def test_a_module_learns(tmp_path: Path) -> None:
    """Asynchronously, and in rounds that are gone on with on other ranks.

    The running means of training are those that are evaluated, later as well.
    """
    plan = Plan(tmp_path)
    conv = ("--problem", f"{MODULES}:Threads", "--batch-size", "16", "--threads", "1")
    for mode in ("async", "sync"):
        plan.add(mode, 3, (*conv, "--mode", mode, "--epochs", "4"))
    plan.add("sync", 2, ("--resume", "--epochs", "5"))
    last = str(plan.out("sync"))
    plan.add("evaluated", 3, ("--eval-only", *conv, "--init-from", last), quiet=False)
    plan.run(200)
    found = summary(plan.out("sync"))
    assert min(found["accuracy"], summary(plan.out("async"))["accuracy"]) > 0.8
    assert (found["epochs"], found["samples"]) == (5, 5 * 1438)
    (told,) = plan.outputs("evaluated")
    assert f"accuracy {found['accuracy']:.6f}, " in told
