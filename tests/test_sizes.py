"""One idea a module, one duty a class: how large each may be, and what is larger for a reason."""

import ast
from collections.abc import Iterator

from tests.test_imports import sources

LINES, FUNCTION_LINES, PARAMETERS, METHODS, ATTRIBUTES = 400, 40, 8, 15, 15
LARGER = {  # each has a sentence in its docstring that says why
    "codecs.topk.take", "kernels.vectors.compensate_adaptive",
    "kernels.exchange.serving", "kernels.exchange.announce", "ps.shard.Server",
    "snapshot.committer.Committer",
}  # fmt: skip
STEPS = ("adam", "amsgrad", "nadam", "radam", "adadelta", "lion")  # of update rules: no objects
LARGER |= {f"kernels.update_rules.{name}" for name in STEPS}


def lines_of(node: ast.FunctionDef) -> int:
    """Return how long a function is without its docstring."""
    doc = ast.get_docstring(node, clean=False)
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1 - (doc.count("\n") + 1 if doc else 0)


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Return the names that methods bind on ``self``."""
    return {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "self"
    }


def too_large(name: str) -> Iterator[str]:
    for node in ast.walk(sources()[name]):
        if isinstance(node, ast.FunctionDef):
            args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            parameters = [arg for arg in args if arg.arg not in ("self", "cls")]
            if lines_of(node) > FUNCTION_LINES or len(parameters) > PARAMETERS:
                yield f"{name}.{node.name}"
        if isinstance(node, ast.ClassDef):
            methods = [inner for inner in node.body if isinstance(inner, ast.FunctionDef)]
            if len(methods) > METHODS or len(attributes_of(node)) > ATTRIBUTES:
                yield f"{name}.{node.name}"


def test_what_is_large_says_why() -> None:
    found = {node for name in sources() for node in too_large(name)}
    assert found - LARGER == set(), "split it, or say why in its docstring and name it in LARGER"
    assert LARGER - found == set(), "it is small now"


def test_modules_are_short() -> None:
    last = {n: max((k.end_lineno or 0 for k in t.body), default=0) for n, t in sources().items()}
    long = {name: lines for name, lines in last.items() if lines > LINES}
    assert not long, "is it one idea?"
