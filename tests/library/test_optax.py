"""Optimizers of optax as the servers' rule, clipping and schedule."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="an extra", exc_type=ImportError)
optax = pytest.importorskip("optax", reason="an extra", exc_type=ImportError)

import jax.numpy as jnp  # noqa: E402

import mpips  # noqa: E402
import mpips.jax as mj  # noqa: E402
from mpips.errors import UserError  # noqa: E402

STEPS, SIZE = 200, 4
PARAMS = {"layers": [{"w": np.ones((3, 2)), "b": np.zeros(2)}], "scale": np.ones(())}
X = np.random.default_rng(0).normal(size=(STEPS * SIZE, 3))
Y = np.sin(X[:, :2]).sum(1)
warm = optax.schedules.warmup_cosine_decay_schedule(0.0, 0.1, 10, 150, 1e-3)


def weights_alone(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.05),
    "momentum": lambda: optax.sgd(0.05, momentum=0.7),
    "nesterov": lambda: optax.sgd(0.02, momentum=0.7, nesterov=True),
    "adam": lambda: optax.adam(0.01, b1=0.8, b2=0.9, eps=1e-3),
    "adamw": lambda: optax.adamw(0.01),
    "lion": lambda: optax.lion(0.01, weight_decay=0.1),
    "decayed adam": lambda: optax.chain(optax.add_decayed_weights(0.1), optax.adam(0.01)),
    "masked": lambda: optax.adamw(0.01, weight_decay=0.2, mask=weights_alone),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(warm)),
    "pieces": lambda: optax.chain(
        optax.clip_by_global_norm(0.3), optax.trace(0.8), optax.scale_by_schedule(warm),
        optax.scale(-0.5),
    ),
}  # fmt: skip


def loss(params: Any, x: Any, y: Any) -> Any:
    (layer,) = params["layers"]
    return (((jnp.tanh(x @ layer["w"] + layer["b"]) * params["scale"]).sum(1) - y) ** 2).mean()


@pytest.fixture
def in_64_bits() -> Any:
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.usefixtures("in_64_bits")
def test_a_run_makes_the_steps_of_optax(name: str, tmp_path: Path) -> None:
    """By one worker, in 64 bits, over as many steps as a schedule has."""
    how = {"mode": "sync", "shuffle": False, "batch_size": SIZE, "epochs": 1, "quiet": True}
    result = mj.run(loss, PARAMS, (X, Y), OPTIMIZERS[name](), out=tmp_path / "run", **how)
    assert result.summary["global_step"] == STEPS
    tx = OPTIMIZERS[name]()
    params = jax.tree.map(jnp.asarray, PARAMS)

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        change, state = tx.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, change), state

    state = tx.init(params)
    for k in range(STEPS):
        batch = slice(k * SIZE, (k + 1) * SIZE)
        params, state = step(params, state, X[batch], Y[batch])
    found, expected = mj.arrays(result.params), mj.arrays(params)
    for key, array in expected.items():
        np.testing.assert_allclose(found[key], array, rtol=1e-12, atol=1e-12, err_msg=key)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "rmsprop": (lambda: optax.rmsprop(0.1), "with optax.scale_by_rms, expected adam, adamw"),
    "clip": (lambda: optax.chain(optax.clip(1.0), optax.adam(0.1)), "with optax.clip, expected"),
    "nadam": (lambda: optax.nadam(0.1), "nesterov=True of optax.scale_by_adam, expected False"),
    "two": (lambda: optax.chain(optax.adam(0.1), optax.lion(0.1)), "scale_by_lion after adam"),
    "late clipping": (
        lambda: optax.chain(optax.adam(0.1), optax.clip_by_global_norm(0.1)),
        r"not those of Adam\(.*with clip 0.1.* clipping comes first",
    ),
    "16 bits": (lambda: optax.adam(0.1, mu_dtype=jnp.bfloat16), "not those of Adam"),
    "decay by schedule": (lambda: optax.adamw(0.1, weight_decay=warm), "weight_decay=.*a number"),
    "every 4": (lambda: optax.MultiSteps(optax.adam(0.1), 4), "MultiSteps"),
    "injected": (lambda: optax.inject_hyperparams(optax.adam)(0.1), "inject_hyperparams"),
    "own": (
        lambda: optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (g, s)),
        "is not of optax",
    ),
    "no rate": (lambda: optax.scale_by_adam(), "rate 0, expected a finite rate > 0"),
    "no trace": (lambda: optax.sgd(lambda n: 0.1 if n < 3 else 0.2), "a schedule that raised"),
    "mask by size": (
        lambda: optax.adamw(0.1, mask=lambda p: jax.tree.map(lambda leaf: leaf.size > 5, p)),
        "a mask that looks at the sizes of arrays, expected a pytree of booleans",
    ),
    "masked": (lambda: optax.masked(optax.adam(0.1), weights_alone), "a mask of scale_by_adam"),
}


def test_what_cannot_be_read_is_refused() -> None:
    for make, told in REFUSED.values():
        with pytest.raises(UserError, match=told):
            mj.rule_of(make(), PARAMS)


def test_a_name_may_have_letters_that_patterns_use() -> None:
    mask = {"a*": False, "ab": True}
    read = mj.rule_of(optax.adamw(0.1, mask=mask), {name: jnp.ones(2) for name in mask})
    assert read.groups == (mpips.Group("a[*]", weight_decay=0.0),)


def test_what_is_given_beside_an_optimizer_of_optax() -> None:
    found = mj.rule_of(OPTIMIZERS["clipped"](), PARAMS)
    assert found.options() == {
        "optimizer": "adamw", "lr": pytest.approx(0.1), "beta1": 0.9, "beta2": 0.999, "eps": 1e-8,
        "weight_decay": 1e-4, "clip": 0.3, "schedule": "constant", "warmup_steps": 0,
    }  # fmt: skip
    with pytest.raises(UserError, match=r"clip=1.0 beside optimizer=AdamW\(.* of optax"):
        mpips.run(callable, mj.arrays(PARAMS), found, mode="sync", clip=1.0)
