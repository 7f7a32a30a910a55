"""Packages that only some commands or formats need, which are extras of the installation."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from mpips.errors import UserError


def load(module: str, package: str, extra: str, what: str) -> Any:
    """Import a module of a package that an extra of mpips installs.

    Args:
        module: Its name.
        package: What the package is called.
        extra: The extra's name.
        what: What it does, such as ``reads images``.

    Raises:
        UserError: If it cannot be imported.
    """
    try:
        return import_module(module)
    except ImportError as problem:
        why = "" if isinstance(problem, ModuleNotFoundError) else f" ({problem})"
        raise missing(why, package, extra, what) from None


def find(module: str, package: str, extra: str, what: str) -> None:
    """Make sure that a module is there, without an import; see `load`.

    Raises:
        UserError: If it is not.
    """
    if find_spec(module.partition(".")[0]) is None:
        raise missing("", package, extra, what)


def missing(why: str, package: str, extra: str, what: str) -> UserError:
    """Make the error for a package that is not there."""
    remedy = f"pip install 'mpips[{extra}]'"
    return UserError(f"no {package}{why}", f"{package}, which {what}", remedy)


def import_name(
    package: str, modules: Mapping[str, str], name: str, into: dict[str, Any]
) -> object:
    """Import a name of a package when it is used, and all others of its module.

    Args:
        package: What has the name, and the modules.
        modules: In which module each name of the package is.
        name: One of them.
        into: The names of the package. A function called as its module is replaces that there.

    Raises:
        AttributeError: If there is no such name.
    """
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    module = import_module(f"{package}.{modules[name]}")
    into.update({n: getattr(module, n) for n, m in modules.items() if m == modules[name]})
    found: object = into[name]
    return found
