"""Python's documentation strings, as the standard library's source has them: text that all have.

    python jobs/documentation.py documentation.txt

writes a file of them, a string a line, for jobs/words.py.
"""

import ast
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def strings(length: int) -> Iterator[str]:
    """Yield documentation strings, until there are so many characters, or all 1.8 million."""
    root, have = Path(sysconfig.get_path("stdlib")), 0
    for path in sorted(root.rglob("*.py")):
        if have >= length:
            break
        if {"site-packages", "test", "tests"} & set(path.relative_to(root).parts):
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found = ast.get_docstring(node)
                if found:
                    yield found
                    have += len(found)


def main(path: str, length: int = 2_000_000) -> None:
    """Write them to a file."""
    lines = (" ".join(string.split()) for string in strings(length))
    Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:2])
