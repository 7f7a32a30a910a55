"""Python's documentation strings, as the standard library's source has them: text that all have."""

import ast
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
