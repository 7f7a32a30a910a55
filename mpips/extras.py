"""Optional packages: extras of the installation, for some commands and formats."""

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
