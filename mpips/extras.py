"""Optional packages: extras of the installation, for some commands and formats."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from mpips.errors import UserError


def load(module: str, package: str, extra: str, what: str) -> Any:
    """Import a module of a package that an extra of mpips installs.

    Args:
        module: Name of the module.
        package: Name of the package.
        extra: Name of the extra.
        what: Purpose of the package, such as ``reads images``.

    Raises:
        UserError: If it cannot be imported.
    """
    try:
        return import_module(module)
    except ImportError as problem:
        why = "" if isinstance(problem, ModuleNotFoundError) else f" ({problem})"
        raise missing(why, package, extra, what) from None


def find(module: str, package: str, extra: str, what: str) -> None:
    """Check that a module is installed, without an import; see `load`.

    Raises:
        UserError: If it is not.
    """
    if find_spec(module.partition(".")[0]) is None:
        raise missing("", package, extra, what)


def missing(why: str, package: str, extra: str, what: str) -> UserError:
    """Return the error for a package that is not installed."""
    remedy = f"pip install 'mpips[{extra}]'"
    return UserError(f"no {package}{why}", f"{package}, which {what}", remedy)
