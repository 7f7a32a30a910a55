"""Reference: what the guide makes from the code is all there is in it."""

import ast
from collections.abc import Iterator

from test_imports import sources

ENDS = {"exit", "_exit", "abort", "SystemExit", "Verdict", "end_all", "leave"}


def bare_codes(tree: ast.AST) -> Iterator[int]:
    """Yield the lines where a number stands for an exit code, in place of a name of `Exit`."""
    for node in ast.walk(tree):
        values: list[ast.AST | None] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ENDS:
            values += node.args
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(ast.unparse(k).rpartition(".")[2] in ("code", "EXIT_CODES") for k in targets):
                values.append(node.value)
        if isinstance(node, ast.FunctionDef) and "exit code" in (ast.get_docstring(node) or ""):
            values += [k.value for k in ast.walk(node) if isinstance(k, ast.Return)]
        for value in values:
            for part in (k for k in (value, *parts(value)) if isinstance(k, ast.Constant)):
                if type(part.value) is int:
                    yield part.lineno


def parts(value: ast.AST | None) -> list[ast.AST]:
    """Return what a value may be: either side of a condition, or the values of a dict."""
    if isinstance(value, ast.IfExp):
        return [value.body, value.orelse]
    return [*value.values] if isinstance(value, ast.Dict) else []


def test_exit_codes_have_names() -> None:
    found = {n: lines for n, tree in sources().items() if (lines := [*bare_codes(tree)])}
    assert not found, "a code that the reference does not have"
    assert sorted(bare_codes(ast.parse("sys.exit(4)\nerror.code = 1 if x else y"))) == [1, 2]
