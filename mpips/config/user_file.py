"""Python files that options name: a problem's, or an update rule's."""

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from mpips.errors import UserError

# Classes that this process's program defines, by the options' text; they are in no file's module.
DEFINED: dict[str, type] = {}


def names_class(text: str) -> bool:
    """Return whether an option's text begins with ``file.py:Class``."""
    return ".py:" in text


def run_file(path: Path, what: str) -> ModuleType:
    """Run a user's file as a module and return it.

    Its directory is appended to `sys.path`.

    Args:
        path: Path of the file.
        what: Kind of the file's class, such as ``"problem"``.

    Raises:
        UserError: If the file does not exist, or raises an exception.
    """
    if path.suffix != ".py":
        raise UserError(f"{what} file '{path}'", "a Python file ending in .py", "use FILE.py:CLASS")
    if not path.is_file():
        raise UserError(f"no {what} file '{path}'", "an existing file", "check the path")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    name = f"mpips_user_{path.stem}"
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look their module up by its name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise raised(f"{what} file '{path}'", error, path, "a file that imports") from error
    return module


def classes_of(module: ModuleType) -> list[str]:
    """Return the names of the classes that a user's file defines."""
    made_there = (value for value in vars(module).values() if isinstance(value, type))
    return sorted(kind.__name__ for kind in made_there if kind.__module__ == module.__name__)


def raised(what: str, error: BaseException, path: Path, expected: str) -> UserError:
    """Return the error for an exception in the user's code, with its message and its line."""
    message = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines.append(error.lineno)
    place = f"see line {lines[-1]} of the file" if lines else ""
    return UserError(f"{what} raised {message}", expected, place)
