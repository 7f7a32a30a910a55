"""Makes mistakes, one after the other, in one process: ``mistakes.py TABLE.json``.

Each is statements of a program, called own.py; what Python would print of it if nothing caught it,
and its exit code, are written in their place.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import mpips

FOLDER = os.getcwd()


def make(statements: str, before: str) -> tuple[int, str]:
    """Run a program that makes a mistake; returns the exit code, and what is printed."""
    names: dict[str, Any] = {"np": np, "mpips": mpips}
    exec(compile(before, "<before>", "exec"), names)
    os.chdir(tempfile.mkdtemp(dir=FOLDER))
    stream, code = io.StringIO(), 0
    with contextlib.redirect_stderr(stream):
        try:
            exec(compile(statements, "own.py", "exec"), names)
        except BaseException as error:
            try:
                sys.excepthook(type(error), error, error.__traceback__)
                code = 1
            except SystemExit as end:
                code = int(str(end.code))
    return code, stream.getvalue()


def main(table: Path) -> None:
    """Make all of them."""
    asked = json.loads(table.read_text())
    told = {name: make(text, asked["before"]) for name, text in asked["mistakes"].items()}
    table.write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
