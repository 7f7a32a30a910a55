"""Update rule and groups of an optimizer of PyTorch."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from fnmatch import filter as matching
from functools import partial
from typing import Any, TypeAlias

import torch

from mpips.config.groups import Group, pattern_of
from mpips.errors import UserError
from mpips.library.optimizers import Optimizer, rule_called
from mpips.torch.state import KINDS, SPEED

MakeOptimizer: TypeAlias = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
PER_GROUP = {"lr", "weight_decay"}
FREE = {*PER_GROUP, *SPEED}  # arguments that may differ from those of the servers' rule


def read_optimizer(make: MakeOptimizer, model: torch.nn.Module) -> tuple[Optimizer, list[Group]]:
    """Return the rule of an optimizer of PyTorch with its numbers, and its parameter groups.

    Args:
        make: Returns the optimizer of the model's parameters, such as
            ``lambda params: torch.optim.AdamW(params, 1e-3)``; or its class.
        model: The module. The optimizer must have all parameters that require a gradient.

    Returns:
        The rule, and a group for each rate or weight decay that differs from the rule's.

    Raises:
        UserError: If `make` raises; if the optimizer is of an unknown class, has numbers that the
            servers' rules do not have, or leaves out a parameter.
    """
    try:
        optimizer = make(model.parameters())
    except Exception as error:
        got = f"optimizer={getattr(make, '__name__', make)} raised {type(error).__name__}: {error}"
        raise UserError(got, "a function of the parameters", "such as torch.optim.Adam") from error
    return _rule(optimizer), _groups(optimizer, model)


def _rule(optimizer: Any) -> Optimizer:
    """Return the rule of the same computation as an optimizer of PyTorch.

    Raises:
        UserError: If there is none; it names the closest rule's first difference.
    """
    kind, least = type(optimizer), dict[str, Any]()
    for name, (make, numbers, _) in KINDS.items():
        if _class(make) is not kind:
            continue
        has, given = optimizer.defaults, dict[str, Any]()
        for key, names in numbers.items():
            values = has[key] if isinstance(has[key], (tuple, list)) else (has[key],)
            given |= zip(names, map(float, values), strict=True)
        with contextlib.suppress(ValueError):  # PyTorch has no Nesterov without momentum
            like = make([torch.zeros(1)], lr=1.0, **{key: has[key] for key in numbers}).defaults
            other = {key: like[key] for key in has if like[key] != has[key] and key not in FREE}
            if not other:
                given |= {"lr": float(has["lr"]), "weight_decay": float(has["weight_decay"])}
                return rule_called(name, given)
            least = min(least or other, other, key=len)
    if not least:
        known = dict.fromkeys(_name(_class(make)) for make, _, _ in KINDS.values())
        raise UserError(f"optimizer= that returns {_name(kind)}", f"one of {', '.join(known)}")
    key, value = next(iter(least.items()))
    got = f"{key}={optimizer.defaults[key]!r} of {_name(kind)}"
    raise UserError(got, f"{value!r}, as the servers' rule has")


def _groups(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> list[Group]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    trained = [name for parameter, name in names.items() if parameter.requires_grad]
    missing = {*trained}
    groups = list[Group]()
    for group in optimizer.param_groups:
        different = {
            key: value
            for key, value in group.items()
            if key != "params" and value != optimizer.defaults.get(key)
        }
        for key in different.keys() - PER_GROUP:
            got = f"{key}={different[key]!r} of a parameter group"
            expected = f"{optimizer.defaults.get(key)!r}, as in the others"
            raise UserError(got, expected, "groups may differ in lr and weight_decay")
        if not names.keys() >= {*group["params"]}:
            remedy = "lambda params: torch.optim.Adam(params)"
            raise UserError("optimizer= of other parameters", "those that it is given", remedy)
        members = [names[p] for p in group["params"] if p.requires_grad]
        missing -= {*members}
        if different:  # patterns with a rate must not match frozen parameters, or they are trained
            others = names.values() if "lr" in different else trained
            groups += [Group(pattern, **different) for pattern in _patterns(members, list(others))]
    if missing:
        name, more = min(missing), f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        remedy = "freeze it in model= by requires_grad_(False), or give it to the optimizer"
        raise UserError(f"optimizer= without parameter {name!r}{more}", "all trained ones", remedy)
    return groups


def _patterns(names: Sequence[str], everywhere: Sequence[str]) -> list[str]:
    """Return few patterns that match all of `names`, and no other name of `everywhere`."""
    matches = defaultdict[str, set[str]](set)
    for name in everywhere:
        for pattern in _candidates(name):
            matches[pattern].add(name)
    for pattern in matches:
        if "?" in pattern:  # it may match other names too
            matches[pattern] = {*matching(everywhere, pattern)}
    exact = [pattern for pattern, found in matches.items() if found <= {*names}]
    missing, patterns = {*names}, list[str]()
    for pattern in sorted(exact, key=lambda pattern: (-len(matches[pattern]), pattern)):
        if missing & matches[pattern]:
            patterns.append(pattern)
            missing -= matches[pattern]
    if missing:
        got, expected = f"a parameter group with {min(missing)!r}", "names without : and ;"
        raise UserError(got, expected, "one of another group differs only in these")
    return patterns


def _candidates(name: str) -> list[str]:
    """Return patterns that match a name: itself, its last part, and its prefixes."""
    parts = pattern_of(name).split(".")
    prefixes = [".".join(parts[:k]) + ".*" for k in range(1, len(parts))]
    suffix = [f"*.{parts[-1]}"] if prefixes else []
    return [".".join(parts), *suffix, *prefixes]


def _class(make: Any) -> type:
    found: Any = make.func if isinstance(make, partial) else make
    return found


def _name(kind: type) -> str:
    inside = kind.__module__.startswith("torch.optim.")
    return f"{'torch.optim' if inside else kind.__module__}.{kind.__qualname__}"
