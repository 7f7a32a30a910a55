"""Lines of code of each room of the package, and how many it may have."""

import ast
from collections import Counter
from pathlib import Path

from launch import ROOT

PACKAGE = ROOT / "mpips"
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

# At most so many lines for each entry of `ls mpips`, and for all. A number falls with the code; it
# rises only in a commit whose message says why.
TOTAL = 39786
TESTS = 37928  # all lines of tests and of their helpers, likewise
BUDGET = {
    "__init__.py": 54,
    "__main__.py": 69,
    "checkpoint": 1523,
    "codecs": 614,
    "config": 1255,
    "datasets": 2652,
    "errors.py": 64,
    "extras.py": 16,
    "failover": 868,
    "health": 707,
    "jax": 413,
    "kernels": 1950,
    "launch": 2341,
    "layout": 440,
    "library": 1654,
    "lightning": 797,
    "mpi": 1796,
    "optim": 978,
    "planning": 2535,
    "problems": 927,
    "ps": 2240,
    "rounds": 2382,
    "session": 1798,
    "snapshot": 714,
    "strategies": 429,
    "tables": 1473,
    "tools": 5660,
    "torch": 1700,
    "train.py": 85,
    "transport": 1652,
}


def code_lines(path: Path) -> int:
    """Count the lines of a module that are neither blank, nor a comment, nor in a docstring."""
    source, documented = path.read_text(), set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            end = node.body[0].end_lineno
            assert end is not None
            documented.update(range(node.body[0].lineno, end + 1))
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in documented
        for number, line in enumerate(source.splitlines(), 1)
    )


def rooms() -> Counter[str]:
    found = Counter[str]()
    for path in PACKAGE.rglob("*.py"):
        found[path.relative_to(PACKAGE).parts[0]] += code_lines(path)
    return found


def test_lines_are_counted(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""A\ndocstring."""\n\n# a comment\nX = """a\ntext"""  # counts\n\n\n'
                      'def f():\n    """Another."""\n    return X\n')  # fmt: skip
    assert code_lines(module) == 4


def test_rooms_keep_to_their_budget() -> None:
    found = rooms()
    assert set(found) == set(BUDGET), "give new rooms a number, and remove those of old ones"
    over = [f"{k}: {n} lines, at most {BUDGET[k]}" for k, n in found.items() if n > BUDGET[k]]
    assert not over, "shorten the room; a number rises only with a reason in the commit"
    total = sum(found.values())
    assert total <= TOTAL, "the package; a number rises only with a reason in the commit"


def test_tests_keep_to_their_budget() -> None:
    found = sum(len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py"))
    assert found <= TESTS, "say a thing once; a number rises only with a reason in the commit"
