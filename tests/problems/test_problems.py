"""Problems: gradients, stability, bad input, learning, and the loading of a user's file."""

import dataclasses
import math
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpips.datasets.base import Batch, DataInfo
from mpips.errors import UserError
from mpips.problems import Problem, load_problem
from mpips.problems.base import initial_vector
from mpips.problems.mlp import accuracy, cross_entropy, squared_error

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "linear": ("linear", {}, {}),
    "linear-columns": ("linear", {"y_shape": (3,)}, {}),
    "linear-scalar-input": ("linear", {"x_shape": ()}, {}),
    "linear-image": ("linear", {"x_shape": (3, 2), "y_shape": (2, 2)}, {}),
    "softmax": ("softmax", {"classes": 4}, {}),
    "softmax-image": ("softmax", {"classes": 3, "x_shape": (2, 3, 2)}, {}),
    "mlp-0": ("mlp", {"classes": 4}, {"hidden": ()}),
    "mlp-1-relu": ("mlp", {"classes": 4}, {"hidden": (7,)}),
    "mlp-1-tanh": ("mlp", {"classes": 4}, {"hidden": (7,), "activation": "tanh"}),
    "mlp-3-relu": ("mlp", {"classes": 3, "x_shape": (2, 3)}, {"hidden": (8, 1, 6)}),
    "mlp-3-tanh": ("mlp", {"classes": 3}, {"hidden": (8, 5, 6), "activation": "tanh"}),
    "mlp-regression": ("mlp", {}, {"hidden": (6,), "activation": "tanh"}),
    "mlp-regression-columns": ("mlp", {"y_shape": (2,)}, {"hidden": (6, 4)}),
    "mlp-regression-0": ("mlp", {"y_shape": (2,)}, {"hidden": ()}),
}


def make_data(**fields: Any) -> DataInfo:
    base = {"name": "made", "n_train": 64, "n_test": 16, "x_shape": (5,), "y_shape": ()}
    return DataInfo(**{**base, "classes": None, "source": "made.npz", **fields})


def make_config(**fields: Any) -> Any:
    base: dict[str, Any] = {"problem": "mlp", "hidden": (8,), "activation": "relu"}
    base |= {"dtype": "float64", "factors": 2}
    return SimpleNamespace(**{**base, **fields})


def make_batch(data: DataInfo, n: int, rng: np.random.Generator, dtype: Any = "f8") -> Batch:
    x = rng.normal(size=(n, *data.x_shape)).astype(dtype)
    if data.classes is None:
        y = rng.normal(size=(n, *data.y_shape)).astype(dtype)
    else:
        y = rng.integers(0, data.classes, n)
    return Batch(x, y, np.arange(n))


def make_case(case: str, **fields: Any) -> tuple[Problem, DataInfo]:
    name, data_fields, config_fields = CASES[case]
    data = make_data(**data_fields)
    return load_problem(name, data, make_config(**config_fields, **fields)), data


def random_vector(problem: Problem, rng: np.random.Generator) -> np.ndarray:
    """A point at which no parameter is zero, biases included."""
    vector = np.empty(problem.layout.size)
    for name, view in problem.layout.views(vector).items():
        view[...] = (
            rng.normal(0, 0.7, view.shape) if name[0] == "w" else rng.normal(size=view.shape)
        )
    return vector


def gradient(problem: Problem, vector: np.ndarray, batch: Batch) -> tuple[float, np.ndarray]:
    views = problem.layout.views
    out = np.full_like(vector, np.nan)
    return problem.loss_and_grad(views(vector), batch, views(out)), out


def numeric_gradient(problem: Problem, vector: np.ndarray, batch: Batch) -> np.ndarray:
    def loss(moved: np.ndarray) -> float:
        return problem.evaluate(problem.layout.views(moved), batch)["loss"]

    steps = 1e-6 * np.eye(vector.size)
    return np.array([(loss(vector + step) - loss(vector - step)) / 2e-6 for step in steps])


every_case = pytest.mark.parametrize("case", CASES)


@pytest.mark.parametrize("n", [1, 9])
@every_case
def test_gradient_is_the_derivative_of_the_loss(case: str, n: int) -> None:
    """Arrays are views at any offset of a vector; what lies around is not touched."""
    rng = np.random.default_rng(5)
    problem, data = make_case(case)
    batch, vector, size = make_batch(data, n, rng), random_vector(problem, rng), problem.layout.size
    wide, views = np.full((2, size + 6), 7.0), problem.layout.views
    wide[0, 3:-3] = vector
    loss = problem.loss_and_grad(views(wide[0, 3:-3]), batch, views(wide[1, 3:-3]))
    assert loss == pytest.approx(problem.evaluate(views(vector), batch)["loss"])
    expected = numeric_gradient(problem, vector, batch)
    np.testing.assert_allclose(wide[1, 3:-3], expected, atol=2e-8, rtol=1e-6)
    assert set(wide[:, [0, 1, 2, -3, -2, -1]].flat) == {7.0}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the mean of no losses
def test_an_mlp_takes_a_batch_without_samples() -> None:
    rng = np.random.default_rng(5)
    problem, data = make_case("mlp-3-relu")
    loss, grad = gradient(problem, random_vector(problem, rng), make_batch(data, 0, rng))
    assert np.isnan(loss)
    assert not grad.any()


@every_case
def test_calls_do_not_depend_on_each_other(case: str) -> None:
    """Batches of other sizes between, and an evaluation, change nothing; inputs are not written."""
    rng = np.random.default_rng(6)
    problem, data = make_case(case)
    vector, batches = random_vector(problem, rng), [make_batch(data, n, rng) for n in (8, 3, 1, 20)]
    fresh = [gradient(make_case(case)[0], vector, batch) for batch in batches]
    inputs = [vector, *(array for batch in batches for array in (batch.x, batch.y))]
    kept = [array.copy() for array in inputs]
    for k in (0, 1, 0, 3, 2, 0, 3, 1):
        loss, grad = gradient(problem, vector, batches[k])
        problem.evaluate(problem.layout.views(vector), batches[(k + 1) % 4])
        assert loss == fresh[k][0]
        np.testing.assert_array_equal(grad, fresh[k][1])
    for before, after in zip(kept, inputs, strict=True):
        np.testing.assert_array_equal(before, after)


@every_case
def test_float32_agrees_with_float64(case: str) -> None:
    rng = np.random.default_rng(8)
    problem, data = make_case(case)
    vector, batch = random_vector(problem, rng), make_batch(data, 33, rng)
    low = Batch(batch.x.astype("f4"), batch.y.astype("i8" if data.classes else "f4"), batch.ids)
    loss, grad = gradient(problem, vector, batch)
    loss32, grad32 = gradient(problem, vector.astype("f4"), low)
    assert (grad32.dtype, type(loss32)) == (np.float32, float)
    assert loss32 == pytest.approx(loss, rel=1e-5)
    assert np.linalg.norm(grad32 - grad) < 1e-5 * np.linalg.norm(grad)


@every_case
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_init(case: str, dtype: str) -> None:
    problem, _ = make_case(case, dtype=dtype)
    first, second = (problem.init(np.random.default_rng(3)) for _ in range(2))
    assert tuple(first) == problem.layout.names
    assert tuple(a.shape for a in first.values()) == problem.layout.shapes
    for name, array in first.items():
        assert array.dtype == dtype
        np.testing.assert_array_equal(array, second[name])
        assert not name.startswith("b") or not array.any()


def test_other_parameters_than_those_of_the_layout_are_refused() -> None:
    problem, _ = make_case("softmax")
    first = problem.init(np.random.default_rng(3))
    for w, words in (
        (first["w"] + np.nan, "with NaN or infinity in 'w', as float64, expected finite"),
        (first["w"][1:], r"gave {'w': \(4, 4\), .*, expected {'w': \(5, 4\), .*lay"),
    ):
        problem.init = lambda rng, w=w: {**first, "w": w}  # type: ignore[method-assign]
        with pytest.raises(UserError, match=words):
            initial_vector(problem, 0, np.dtype("f8"))


@pytest.mark.parametrize(("activation", "variance"), [("relu", 2 / 400), ("tanh", 2 / 1000)])
def test_init_variance(activation: str, variance: float) -> None:
    config = make_config(hidden=(600,), activation=activation)
    problem = load_problem("mlp", make_data(x_shape=(20, 20), classes=10), config)
    params = problem.init(np.random.default_rng(1))
    assert params["w1"].var() == pytest.approx(variance, rel=0.02)
    assert params["w2"].var() == pytest.approx(2 / 610, rel=0.08)
    config.dtype = "float32"
    low = load_problem("mlp", problem.data, config).init(np.random.default_rng(1))
    np.testing.assert_array_equal(low["w1"], params["w1"].astype("f4"))


def test_values_by_hand() -> None:
    z = np.array([[1.0, 2.0], [0.0, -3.0]])
    assert squared_error(z, np.array([[0.0, 0.0], [1.0, -1.0]])) == (5 / 2 + 5 / 2) / 2
    np.testing.assert_array_equal(z, [[0.5, 1.0], [-0.5, -1.0]])
    z = np.zeros((2, 4))
    assert cross_entropy(z, np.array([3, 0])) == pytest.approx(math.log(4))
    np.testing.assert_array_equal(z[0], [0.125, 0.125, 0.125, -0.375])
    z = np.full((2, 1), 1e25, np.float32)  # whose squares are beyond single precision
    assert squared_error(z, np.zeros(2, np.float32)) == pytest.approx(0.5e50, rel=1e-6)
    z = np.array([[0.0, 2.0], [1.0, 0.0], [np.nan, 0.0], [3.0, 4.0]])
    assert accuracy(z, np.array([1, 0, 0, 0])) == 0.5


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_huge_logits(dtype: Any) -> None:
    big = np.finfo(dtype).max / 4
    z = np.array([[big, -big, 0], [1e4, 1e4, -1e4], [-big, -big, -big]], dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = cross_entropy(z, np.array([0, 1, 2]))
    assert loss == pytest.approx((0 + math.log(2) + math.log(3)) / 3)
    wanted = np.array([[0, 0, 0], [0.5, -0.5, 0], [1 / 3, 1 / 3, -2 / 3]])
    np.testing.assert_allclose(z * 3, wanted, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["sample", "x", "params", "both"])
@every_case
def test_non_finite_input_gives_a_non_finite_loss(case: str, where: str, bad: float) -> None:
    rng = np.random.default_rng(12)
    problem, data = make_case(case)
    vector, batch = random_vector(problem, rng), make_batch(data, 5, rng)
    if where == "sample":
        batch.x.reshape(5, -1)[2, 0] = bad
    elif where != "params":
        batch.x[...] = bad
    if where in ("params", "both"):
        vector[...] = bad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss, _ = gradient(problem, vector, batch)
        judged = problem.evaluate(problem.layout.views(vector), batch)
    # Infinite inputs saturate a tanh, and a relu that lets nothing through gives zeros.
    if math.isnan(bad) or "mlp" not in case or not problem.config.hidden:
        assert not math.isfinite(loss)
        assert not math.isfinite(judged["loss"])
        assert judged.get("accuracy", 0) == 0 or where == "sample"


def told(name: str, data: DataInfo, config: Any) -> tuple[str, BaseException | None]:
    """Return the message for a problem that cannot be made, and what has led to it."""
    with pytest.raises(UserError) as caught:
        load_problem(name, data, config)
    assert "\n" not in str(caught.value)
    return str(caught.value), caught.value.__cause__


def test_bad_names_and_data() -> None:
    for name, data, config, words in (
        ("linear", {"classes": 10}, {}, "'linear' with the 10 class.* 'made', expected real"),
        ("softmax", {}, {}, "'softmax' .* 'made', expected class labels; use --problem linear"),
        ("mlp:MLP", {}, {}, "mlp', expected a Python file ending in .py"),
        ("~nobody_here/file.py:Mine", {}, {}, "no problem file .*, expected an existing file"),
        (f"{Path(__file__).parent}:Mean", {}, {}, "ending in .py"),
    ):
        assert re.search(words, told(name, make_data(**data), make_config(**config))[0])


USER_FILE = """
import numpy as np
from mpips.errors import UserError
from mpips.layout import Layout
from mpips.problems import Problem

class Mean:
    '''Learns the mean of the inputs; no subclass of Problem.'''
    def __init__(self, data, config):
        self.layout = Layout.of({"m": data.x_shape})
    def init(self, rng):
        return {"m": np.zeros(self.layout.shapes[0])}
    def loss_and_grad(self, params, batch, out):
        out["m"][...] = (params["m"] - batch.x).mean(axis=0)
        return self.evaluate(params, batch)["loss"]
    def evaluate(self, params, batch):
        return {"loss": float(0.5 * ((params["m"] - batch.x) ** 2).sum() / len(batch.x))}

class Derived(Mean, Problem):
    pass

"""  # of 21 lines


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE)
    return path


@pytest.mark.parametrize("name", ["{}:Mean", "{}:Derived", "mine.py:Mean", "~/mine.py:Mean"])
def test_user_class(user_file: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file may import its neighbours."""
    monkeypatch.chdir(user_file.parent)
    monkeypatch.setenv("HOME", str(user_file.parent))
    (user_file.parent / "neighbour_of_mine.py").write_text("SIZE = 4\n")
    user_file.write_text("from neighbour_of_mine import SIZE\n" + USER_FILE)
    data = make_data()
    problem = load_problem(name.format(user_file), data, make_config())
    batch = make_batch(data, 6, np.random.default_rng(0))
    _, grad = gradient(problem, np.zeros(5), batch)
    np.testing.assert_allclose(grad, -batch.x.mean(axis=0))


INIT = "class Bad(Mean):\n    def __init__(self, data, config):"
LACKING = "class Bad:\n    evaluate = 3\n    def __init__(self, d, c): 0\n    def init(self): 0"
BAD = {  # what is said of what `Bad` is
    "class Badd: pass": "no class 'Bad' in .*mine.py.*did you mean 'Badd'?",
    "Bad = np": "no class 'Bad'",
    "def Bad(data, config): pass": r"function 'Bad' in .*mine.py without init\(rng, data\)",
    "class Bad(Problem):\n    def init(self, rng): pass": "Bad without loss_and_grad, evaluate, ",
    LACKING: "mine.py:Bad without loss_and_grad, evaluate",
    "class Bad(Mean):\n    def __init__(self): pass": r"Bad raised TypeError.*CLASS\(data, ",
    f"{INIT} raise KeyError('lost')": "Bad raised KeyError: 'lost'.*see line 23 of the file",
    f"{INIT} pass": "mine.py:Bad with layout=None, expected .*Layout",
    f"{INIT} self.layout = {{'m': (3,)}}": r"Bad with layout={'m': \(3,\)}.*Layout.of",
    f"{INIT} self.layout = Layout.of({{}})": "Bad with no parameters.*non-empty",
    f"{INIT} raise UserError('x=1', 'x=2')": "x=1, expected x=2",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_user_class(user_file: Path, text: str) -> None:
    user_file.write_text(f"{USER_FILE}{text}\n")
    assert re.search(BAD[text], told(f"{user_file}:Bad", make_data(), make_config())[0])


RAISING: dict[str, tuple[Any, str]] = {  # a file, what it raises, and what is said of it
    "x = 1\ny = x / 0\n": (ZeroDivisionError, "Error: division by zero.*line 2"),
    "x = 1\n\ndef f(:\n": (SyntaxError, "SyntaxError: .*line 3 of the file"),
    "raise SystemExit(3)\n": (SystemExit, "SystemExit: 3"),
    "raise ValueError('one\\ntwo')\n": (ValueError, "raised ValueError: one, expected"),
    "\0": ((SyntaxError, ValueError), "null bytes"),
}


@pytest.mark.parametrize("text", RAISING)
def test_user_file_that_raises(user_file: Path, text: str) -> None:
    user_file.write_text(text)
    message, error = told(f"{user_file}:Mean", make_data(), make_config())
    cause, words = RAISING[text]
    assert isinstance(error, cause)
    assert error.__traceback__ is not None
    assert "mpips_user_mine" not in sys.modules
    assert re.search(f"mine.py.*{words}", message)


FUNCTIONS = """
import numpy as np
from mpips.problems.mlp import cross_entropy

def init(rng, data):
    return {"w": np.zeros((*data.x_shape, data.classes)), "b": np.zeros(data.classes)}

def loss(params, batch, out):
    delta = batch.x @ params["w"] + params["b"]
    found = cross_entropy(delta, batch.y)
    out["w"][...], out["b"][...] = batch.x.T @ delta, delta.sum(axis=0)
    return found
"""
EVALUATE = """
def evaluate(params, batch):
    return {"loss": cross_entropy(batch.x @ params["w"] + params["b"], batch.y), "own": 7}
"""


def test_user_function(user_file: Path) -> None:
    """Without ``evaluate`` there is the loss; it may read sparse batches, as a class may."""
    rng, data, config = np.random.default_rng(1), make_data(classes=4), make_config(seed=0)
    expected = load_problem("softmax", data, config)
    vector, batch = random_vector(expected, rng), make_batch(data, 6, rng)
    loss, grad = gradient(expected, vector, batch)
    for evaluate, more in ((EVALUATE, {"own": 7}), ("", {})):
        user_file.write_text(FUNCTIONS + evaluate)
        problem = load_problem(f"{user_file}:loss", data, config)
        assert problem.layout == expected.layout
        assert gradient(problem, vector, batch)[0] == loss
        np.testing.assert_allclose(gradient(problem, vector, batch)[1], grad, rtol=1e-12)
        found = problem.evaluate(problem.layout.views(vector), batch)
        assert found == {"loss": pytest.approx(loss), **more}
        assert not any(array.any() for array in problem.init(rng).values())
    sparse = dataclasses.replace(data, sparse=True)
    assert load_problem(f"{user_file}:loss", sparse, config).layout == expected.layout
    user_file.write_text(FUNCTIONS.replace("return found", "return found, out"))
    with pytest.raises(UserError, match="returned tuple, expected a number, the mean loss"):
        load_problem(f"{user_file}:loss", data, config).evaluate(
            problem.layout.views(vector), batch
        )
    user_file.write_text(FUNCTIONS.replace('return {"w"', 'return 0, {"w"'))
    with pytest.raises(UserError, match="init that returned tuple, expected arrays by name"):
        load_problem(f"{user_file}:loss", data, config)
