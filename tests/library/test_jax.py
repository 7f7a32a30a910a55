"""JAX: pytrees as parameters, what is shared without a copy, and runs on real ranks."""

import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launch import ROOT, run
from runs import HERE, Plan, summary

import mpips
import mpips.jax as mj
from mpips.config import Config
from mpips.datasets import Batch, DataInfo
from mpips.errors import UserError
from mpips.layout import Layout, aligned_zeros
from mpips.problems import load_problem

LOSSES = str(HERE / "problems" / "losses.py")
PROGRAM = ROOT / "tests" / "library" / "programs" / "nets_jax.py"
TREE = {
    "layers": [{"w": np.ones((3, 5), "f4"), "b": np.zeros(5, "f4")}, np.ones((4, 8), "f4")],
    "scale": 2.0,
    "half": jnp.full((16,), 0.5, jnp.bfloat16),
}


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.other_mpi
def test_a_net_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPROC")  # set here by mpips.jax, and each rank has its own share
    found = run(3, [str(PROGRAM), str(tmp_path)], tmp_path, 240).check()
    assert found.output.count("is done") == 3, found.output


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.one_mpi
def test_a_loss_is_a_problem_of_the_command_line(tmp_path: Path) -> None:
    plan = Plan(tmp_path)
    plan.add("async", 3, ["--problem", f"{LOSSES}:loss", "--lr", "0.01", "--epochs", "8"])
    plan.run(240)
    found = summary(plan.out("async"))
    assert (found["epochs"], found["samples"]) == (8, 8 * 1438)
    assert found["accuracy"] > 0.85


# Without ranks -------------------------------------------------------------------------------


def test_leaves_are_named_by_their_paths() -> None:
    """Those of whole cache lines come first."""
    arrays = mj.arrays(TREE)
    assert list(arrays) == ["half", "layers/1", "layers/0/b", "layers/0/w", "scale"]
    assert {array.dtype for array in arrays.values()} == {np.dtype("f4")}
    assert arrays["scale"].shape == ()
    assert list(mj.arrays(np.ones(3))) == ["params"]


def test_a_pytree_comes_back_in_its_own_types() -> None:
    found = mj.tree({name: array + 1 for name, array in mj.arrays(TREE).items()}, TREE)
    assert jax.tree.structure(found) == jax.tree.structure(TREE)
    assert found["half"].dtype == jnp.bfloat16
    expected = jax.tree.map(lambda leaf: jnp.asarray(leaf) + 1, TREE)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"n": np.arange(3)}, r"params\['n'\] of dtype int64, expected floating-point numbers"),
        ({"a/b": 1.0, "a": {"b": 2.0}}, "two leaves called 'a/b'"),
    ],
)
def test_leaves_that_cannot_be_trained(params: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        mj.value_and_grad(lambda params, x: 0.0, params)


def views(vector: np.ndarray, tree: Any) -> dict[str, np.ndarray]:
    """Return a pytree's arrays as views of a vector, which holds their values."""
    arrays = mj.arrays(tree)
    found = Layout.of({name: array.shape for name, array in arrays.items()}).views(vector)
    for name, array in arrays.items():
        found[name][...] = array
    return found


def quadratic(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    total = sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(params))
    return jnp.mean((x * total - y) ** 2)


def test_the_gradient_is_that_of_jax() -> None:
    size = sum(array.size for array in mj.arrays(TREE).values())
    params, out = (views(np.zeros(size, "f4"), TREE) for _ in range(2))
    x, y = np.linspace(0, 1, 8, dtype="f4"), np.ones(8, "f4")
    value = mj.value_and_grad(quadratic, TREE)(params, Batch(x, y, np.arange(8)), out)
    expected, grads = jax.value_and_grad(quadratic)(jax.tree.map(jnp.asarray, TREE), x, y)
    assert type(value) is float
    assert value == pytest.approx(float(expected), rel=1e-6)
    for name, grad in mj.arrays(grads).items():
        np.testing.assert_allclose(out[name], grad, rtol=1e-2 if name == "half" else 1e-6)


def test_what_a_loss_is_given_of_a_batch() -> None:
    ids, rows, out = np.array([3, 1]), np.ones((2, 4), "f4"), {"params": np.zeros(2, "f4")}
    given: list[Any] = []

    def loss(params: Any, *columns: Any) -> jax.Array:
        given[:] = columns
        return params.sum()

    for x, y, count in ((rows, None, 1), ({"a": rows}, None, 1), (None, None, 1), (rows, ids, 2)):
        gradient = mj.value_and_grad(loss, np.zeros(2, "f4"))
        assert gradient({"params": np.ones(2, "f4")}, Batch(x, y, ids), out) == 2.0
        np.testing.assert_array_equal(out["params"], 1)
        assert len(given) == count
    with pytest.raises(UserError, match="data that is a sequence of samples"):
        gradient({"params": np.ones(2, "f4")}, Batch(["a", "b"], None, ids), out)


def test_parameters_change_only_when_all_is_computed() -> None:
    """They are shared, not copied: what is written right after a call must not be seen by it."""
    n = 512
    vector = aligned_zeros(n * n, np.dtype("f4"))
    weights, out = vector.reshape(n, n), {"params": np.zeros((n, n), "f4")}

    def loss(params: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(8):  # long enough to be overtaken
            x = jnp.tanh(x @ params)
        return (x * params).mean()

    gradient = mj.value_and_grad(loss, weights)
    rng, expected = np.random.default_rng(0), jax.jit(jax.value_and_grad(loss))
    for _ in range(5):
        weights[...] = rng.normal(0, 0.1, (n, n))
        x = rng.normal(size=(n, n)).astype("f4")
        value, grad = expected(weights.copy(), x)
        value, grad = float(value), np.array(grad)
        found = gradient({"params": weights}, Batch(x, None, np.arange(n)), out)
        weights[...] = np.nan
        assert found == pytest.approx(value, rel=1e-5)
        np.testing.assert_allclose(out["params"], grad, rtol=1e-3, atol=1e-7)


def test_evaluation_gives_numbers() -> None:
    params, batch = {"params": np.ones(2, "f4")}, Batch(np.ones(2, "f4"), None, np.arange(2))
    metrics = mj.evaluation(lambda params, x: {"loss": (params * x).sum()}, np.zeros(2))
    found = metrics(params, batch)
    assert (found, type(found["loss"])) == ({"loss": 2.0}, float)
    each = mj.evaluation(lambda params, x: {"each": params * x}, np.zeros(2))(params, batch)
    assert each["each"].shape == (2,), "the run tells of its shape"
    with pytest.raises(UserError, match="evaluate that returned"):
        mj.evaluation(lambda params, x: x.sum(), np.zeros(2))(params, batch)


def make(name: str, **fields: Any) -> Any:
    """Return a loss as a problem of made data: 5 inputs, 4 classes."""
    base = {"name": "made", "n_train": 66, "n_test": 16, "x_shape": (5,), "y_shape": ()}
    data = DataInfo(**{**base, "classes": 4, "source": "made.npz", **fields})
    return load_problem(f"{LOSSES}:{name}", data, Config(batch_size=8))


def test_the_loss_and_gradient_of_a_problem_are_those_of_jax() -> None:
    problem = make("loss")
    assert problem.layout.names == ("0/b", "0/w", "1/w", "1/b")
    params = views(aligned_zeros(164, np.dtype("f4")), problem.init(np.random.default_rng(0)))
    out = problem.layout.views(aligned_zeros(164, np.dtype("f4")))
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(8, 5)).astype("f4"), rng.integers(0, 4, 8)
    from_file = runpy.run_path(LOSSES)
    like = from_file["init"](rng, problem.data)
    value, grads = jax.value_and_grad(from_file["loss"])(mj.tree(params, like), x, y)
    for _ in range(2):  # the first time it is compiled for the last batch as well
        found = problem.loss_and_grad(params, Batch(x, y, np.arange(8)), out)
        assert found == pytest.approx(float(value), rel=1e-6)
        for name, grad in mj.arrays(grads).items():
            np.testing.assert_allclose(out[name], grad, rtol=1e-5, atol=1e-7)
    found = problem.evaluate(params, Batch(x, y, np.arange(8)))
    assert found["loss"] == pytest.approx(float(value), rel=1e-6)
    assert 0 <= found["accuracy"] <= 1


REFUSED = {
    "each": r"loss that returned float32\[2\], expected a number, the mean loss over the batch",
    "traced": r"losses.py:traced raised ConcretizationTypeError: .*expected init.*see line 39 of",
    "two": r"two raised TypeError: .*, expected init.* that JAX traces for x of \(n, 5\), or a",
    "lost": r"no class 'lost' in",
    "loss": "loss' with the sparse samples of dataset 'made'",
}


def test_what_is_no_loss() -> None:
    for name, told in REFUSED.items():
        with pytest.raises(UserError, match=told):
            make(name, sparse=name == "loss")


def test_a_loss_of_real_targets_and_nothing_else(tmp_path: Path) -> None:
    text = "def init(rng, data): return 0.5\ndef loss(params, x, y): return params * 2\n"
    (tmp_path / "small.py").write_text(text)
    data = DataInfo("made", 10, 0, (5,), (), None, "made.npz")
    problem = load_problem(f"{tmp_path / 'small.py'}:loss", data, Config(batch_size=5))
    batch = Batch(np.ones((5, 5), "f4"), np.ones(5, "f4"), np.arange(5))
    assert problem.evaluate(problem.init(np.random.default_rng(0)), batch) == {"loss": 1.0}


class Whole(mpips.UpdateRule):
    lr: float = 0.5

    def update(self, name: str, w: Any, g: Any, /, t: int, lr: float) -> Any:
        return (w - lr * g,)


def test_a_rule_of_whole_arrays_is_none_of_optax(tmp_path: Path) -> None:
    result = mj.run(
        lambda w, x: ((w - x) ** 2).mean(), 0.0, np.full(4, 3.0), Whole(0.25), mode="sync",
        batch_size=4, epochs=2, out=tmp_path / "run", quiet=True,
    )  # fmt: skip
    assert float(result.params) == 2.25
