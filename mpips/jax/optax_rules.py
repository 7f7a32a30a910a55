"""Update rule, clipping and schedule of an optimizer of optax."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpips.config.groups import Group, pattern_of, text_of
from mpips.errors import UserError
from mpips.jax.trees import Leaves, PyTree
from mpips.library.optimizers import SGD, Optimizer, Schedule, rule_called
from mpips.optim import Rule, clip_factor, make_rule

READ = (
    "adam, adamw, sgd or lion of optax, or a chain of clip_by_global_norm, add_decayed_weights, "
    "one of these and scale_by_learning_rate"
)
# For each rule: optax's function, the rule's name in mpips, the options of optax's numbers, and the
# values that other arguments must have.
ADAM = {"b1": "beta1", "b2": "beta2", "eps": "eps"}
CORES: tuple[tuple[str, str, dict[str, str], dict[str, Any]], ...] = (
    ("trace", "momentum", {"decay": "momentum"}, {"nesterov": False}),
    ("trace", "nesterov", {"decay": "momentum"}, {"nesterov": True}),
    ("scale_by_adam", "adam", ADAM, {"nesterov": False, "eps_root": 0}),
    ("scale_by_lion", "lion", {"b1": "beta1", "b2": "beta2"}, {"mode": "hard"}),
)
COMBINE = ("chain", "with_extra_args_support", "named_chain")
BLOCK = 1024  # rates that are computed at once
TRIED = (0.5, 3.0, 0.01, 20.0, 1.0, 0.2)  # norms of trial gradients, as multiples of the bound
CLOSE = 1e-9  # largest difference of two computations in 64 bits

Piece = tuple[str, Mapping[str, Any]]  # a transformation: its function's name, and its closure


class Read(Optimizer):
    """An update rule as read from an optimizer of optax.

    Attributes:
        lr: Learning rate; with a schedule the largest of its first rates.
        rule: The rule, with its numbers.
        clip: Bound of the global norm; 0 for none.
        groups: Groups of the arrays without weight decay.
        rate_schedule: Rate by the number of the update, from 1; None for a constant one.
    """

    name = "optax"
    rule: Optimizer = field(default_factory=SGD)
    clip: float = 0.0
    groups: tuple[Group, ...] = ()
    rate_schedule: Schedule | None = None

    def __repr__(self) -> str:
        return f"{self.rule!r} of optax"

    def options(self) -> dict[str, Any]:
        """See `Optimizer.options`."""
        options = self.rule.options()
        if self.clip:
            options["clip"] = self.clip
        if self.groups:
            options["groups"] = text_of(self.groups)
        if self.rate_schedule is not None:
            options |= {"schedule": "constant", "warmup_steps": 0}
        return options


def rule_of(found: Any, params: PyTree) -> Read:
    """Return the rule of an optimizer of optax, with its clipping and its schedule.

        mpips.run(train, mj.arrays(params), mj.rule_of(optax.adamw(1e-3), params))

    optax stores numbers in closures. They are read from there. Then the rule's updates are compared
    with the optimizer's own, over a few steps of random gradients in 64 bits.

    Args:
        found: An optimizer such as ``optax.adamw(1e-3)``, or a chain.
        params: The parameters, a pytree of arrays. A mask of the weight decay fits it.

    Raises:
        UserError: If mpips has no such rule, or its updates differ.
    """
    if not callable(getattr(found, "init", None)) or not callable(getattr(found, "update", None)):
        raise UserError(f"optimizer of type {type(found).__name__}", READ)
    small = _like(params)
    read = _read(_pieces(found.update), params, small)
    try:
        error = _difference(found, read, small)
    except Exception as problem:
        got = f"optimizer= that raised {type(problem).__name__}: {problem}"
        raise UserError(got, "one that updates the parameters") from problem
    if not error <= CLOSE:
        got = f"optimizer= whose updates are not those of {read.rule} with clip {read.clip:g}"
        remedy = "in a chain clipping comes first, and numbers have 64 bits, as mu_dtype=None gives"
        raise UserError(f"{got}, by {error:.1g}", READ, remedy)
    return read


def _pieces(update: Any) -> Iterator[Piece]:
    """Yield the transformations of a chain in their order.

    Raises:
        UserError: If one is not of optax.
    """
    code = getattr(update, "__code__", None)
    name = getattr(update, "__qualname__", type(update).__name__).partition(".")[0]
    if not getattr(update, "__module__", "").startswith("optax") or code is None:
        raise UserError(f"optimizer= with {name}, which is not of optax", READ)
    cells = getattr(update, "__closure__", None) or ()
    closure = {k: cell.cell_contents for k, cell in zip(code.co_freevars, cells, strict=True)}
    if name not in COMBINE:
        yield name, closure
        return
    for inner in _inner([*closure.values()]):
        yield from _pieces(inner)


def _inner(values: Sequence[Any]) -> Iterator[Any]:
    """Yield the update functions among the values of a combination's closure."""
    for value in values:
        if hasattr(value, "update") and hasattr(value, "init"):
            yield value.update
        elif isinstance(value, (list, tuple)):
            yield from _inner([v for v in value if not isinstance(v, str)])
        elif getattr(value, "__qualname__", "").endswith(("update_fn", "update")):
            yield value


def _read(pieces: Iterator[Piece], params: PyTree, small: PyTree) -> Read:
    """Return the rule that the transformations of a chain make.

    Args:
        pieces: The transformations.
        params: The parameters.
        small: A pytree like them, with small leaves.

    Raises:
        UserError: If a transformation is unknown; if the rate is not finite and positive, or cannot
            be computed.
    """
    rule, numbers, clip, scales = "sgd", dict[str, float](), 0.0, list[Any]()
    groups: tuple[Group, ...] = ()
    for name, closure in pieces:
        mask = None
        if name == "masked":
            mask = closure["mask"]
            (name, closure), *more = _pieces(closure["inner"].update)
            if name != "add_decayed_weights" or more:
                raise UserError(f"optimizer= with a mask of {name}", "one of weight decay")
        if name == "clip_by_global_norm":
            clip = _number(name, closure, "max_norm")
        elif name == "add_decayed_weights":
            if decay := _number(name, closure, "weight_decay"):
                if "weight_decay" in numbers:
                    raise UserError("optimizer= with two weight decays", "one")
                numbers["weight_decay"] = decay
                rule = "adamw" if rule == "adam" else rule
                groups = () if mask is None else _undecayed(mask, params, small)
        elif name in ("scale", "scale_by_schedule"):
            scales.append(closure["step_size" if name == "scale" else "step_size_fn"])
        elif name != "identity":
            rule, of_core = _core(name, closure, rule)
            numbers |= of_core
    schedule, lr = _rates(scales)
    if not 0 < lr < math.inf:
        raise UserError(f"optimizer= with rate {lr:g}", "a finite rate > 0")
    return Read(lr, rule_called(rule, {"lr": lr, **numbers}), clip, groups, schedule)


def _core(name: str, closure: Mapping[str, Any], before: str) -> tuple[str, dict[str, float]]:
    """Return the rule of a transformation, behind the rule `before`, and the rule's numbers.

    Raises:
        UserError: If it is of no rule, or there was one.
    """
    known = [core for core in CORES if core[0] == name]
    if not known or before != "sgd":
        second = f" after {before}" if known else ""
        raise UserError(f"optimizer= with optax.{name}{second}", READ)
    for _, rule, numbers, fixed in known:
        other = {k: closure[k] for k in fixed if k in closure and closure[k] != fixed[k]}
        if not other:
            return rule, {ours: _number(name, closure, key) for key, ours in numbers.items()}
    key, value = next(iter(other.items()))
    raise UserError(f"{key}={value!r} of optax.{name}", f"{fixed[key]!r}, as here")


def _undecayed(mask: Any, params: PyTree, small: PyTree) -> tuple[Group, ...]:
    """Return the groups of the arrays that a mask leaves without weight decay.

    Raises:
        UserError: If the mask differs for small arrays, which the trial has.
    """
    whole, each = (mask(tree) if callable(mask) else mask for tree in (params, small))
    if jax.tree.leaves(whole) != jax.tree.leaves(each):
        got = "optimizer= with a mask that looks at the sizes of arrays"
        raise UserError(got, "a pytree of booleans", "give it mask=mask(params)")
    each = jax.tree.map(lambda on, below: jax.tree.map(lambda _: on, below), whole, small)
    decays = zip(Leaves(small).names, jax.tree.leaves(each), strict=True)
    return tuple(Group(pattern_of(name), weight_decay=0.0) for name, on in decays if not on)


def _number(name: str, closure: Mapping[str, Any], key: str) -> float:
    value, numbers = closure.get(key, ""), (int, float, np.number, np.ndarray, jax.Array)
    if not isinstance(value, numbers) or np.shape(value):
        got = f"{key}={getattr(value, '__name__', value)!r} of optax.{name}"
        raise UserError(got, "a number", "a schedule may set the rate alone")
    return float(value)


def _rates(scales: Sequence[Any]) -> tuple[Schedule | None, float]:
    """Return the rate by the number of the update, None if constant, and the largest first rate."""
    fixed = -math.prod(float(scale) for scale in scales if not callable(scale))
    functions = [scale for scale in scales if callable(scale)]
    if not functions:
        return None, fixed if scales else 0.0

    @functools.lru_cache(maxsize=2)
    def block(number: int) -> list[float]:
        def rate(count: Any) -> Any:
            return fixed * math.prod(function(count) for function in functions)

        with _in_64_bits():
            counts = jnp.arange(number * BLOCK, (number + 1) * BLOCK, dtype=jnp.int32)
            rates: list[float] = np.asarray(jax.lax.map(rate, counts), float).tolist()
        return rates

    def schedule(step: int) -> float:
        number, k = divmod(step - 1, BLOCK)
        return block(number)[k]

    try:
        return schedule, max(block(0))
    except Exception as error:
        got = f"a schedule that raised {type(error).__name__}: {error}"
        remedy = "write it with jax.numpy: jnp.where in place of if"
        raise UserError(got, "a function of the count that JAX can trace", remedy) from error


def _in_64_bits() -> AbstractContextManager[Any]:
    """Return a context in which JAX computes in 64 bits."""
    module: Any = jax if hasattr(jax, "enable_x64") else jax.experimental
    return module.enable_x64(True)


def _like(params: PyTree) -> PyTree:
    """Return a pytree like the parameters, with at most 2 elements along each axis."""
    rng = np.random.default_rng(0)

    def small(leaf: Any) -> np.ndarray:
        return np.asarray(rng.normal(size=[min(2, n) for n in np.shape(leaf)]))

    return jax.tree.map(small, params)


def _difference(found: Any, read: Read, small: PyTree) -> float:
    """Return the largest difference of parameters after steps of both, in 64 bits."""
    leaves, structure = jax.tree.flatten(small)
    rules, rng = _rules(read, Leaves(small).names), np.random.default_rng(1)
    ours = [np.array(leaf).reshape(-1) for leaf in leaves]
    pairs = zip(rules, ours, strict=True)
    slots = [tuple(np.zeros_like(array) for _ in rule.slots) for rule, array in pairs]
    with _in_64_bits():
        theirs = [jnp.asarray(leaf) for leaf in leaves]
        state = found.init(structure.unflatten(theirs))
        for step, norm in enumerate(TRIED, 1):
            grads = [np.asarray(rng.normal(size=leaf.shape)) for leaf in leaves]
            factor = norm * (read.clip or 1) / math.sqrt(_square(grads))
            grads = [factor * grad for grad in grads]
            trees = ([jnp.asarray(grad) for grad in grads], theirs)
            given, params = (structure.unflatten(tree) for tree in trees)
            change, state = found.update(given, state, params)
            theirs = [p + c for p, c in zip(theirs, jax.tree.leaves(change), strict=True)]
            factor = clip_factor(_square(grads), read.clip)
            lr = read.rate_schedule(step) if read.rate_schedule else float(read.lr or 0)
            for rule, array, grad, own in zip(rules, ours, grads, slots, strict=True):
                rule.apply(array, factor * grad.reshape(-1), own, step, lr)
        both = zip(theirs, ours, strict=True)
        return max(float(np.abs(np.asarray(t).reshape(-1) - o).max(initial=0)) for t, o in both)


def _square(arrays: Sequence[np.ndarray]) -> float:
    return sum(float((array * array).sum()) for array in arrays)


def _rules(read: Read, names: Sequence[str]) -> list[Rule]:
    """Return the rule of each array, by its name."""
    numbers = read.rule.options()
    rule = make_rule(numbers.pop("optimizer"), **numbers)
    undecayed, bare = {group.pattern for group in read.groups}, replace(rule, weight_decay=0.0)
    return [bare if pattern_of(name) in undecayed else rule for name in names]
