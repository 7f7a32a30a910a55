"""Preparation of users' steps for compilation into loops."""

import ast
import builtins
import inspect
from collections.abc import Mapping
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from mpips.errors import UserError
from mpips.kernels.compiled import Kernel
from mpips.kernels.rule_loops import step as make_step

# Names in a prepared step: the type of the parameters, and a number that makes it a float type.
REAL, ZERO = "_real", "_zero"


@cache
def step_of(kind: Any) -> Kernel:
    """Make the step of a user's class.

    Raises:
        UserError: If the class has no `step`, or `step` has other parameters.
    """
    function = inspect.unwrap(kind.__dict__.get("step") or getattr(kind, "step", None) or len)
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        raise UserError(f"{kind.__name__} without step", "def step(w, g, STATE.., /, lr, ..)")
    parameters = list(inspect.signature(function).parameters.values())
    before = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    plain = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if len(before) < 2 or "self" in before or not plain:
        got = f"step{inspect.signature(function)} of {kind.__name__}"
        raise UserError(got, "step(w, g, STATE.., /, lr, ..), without self")
    return _compilable(function)


def _compilable(
    function: FunctionType, made: dict[FunctionType, Kernel | None] | None = None
) -> Kernel:
    """Rewrite a user's function, and all functions that it calls, so that a loop can call it.

    Every number in the function gets the type of the first argument, so no operand turns float32
    into float64; if that is an integer, such as an index, a float type. The cache finds the machine
    code by the function's text, not by its file.

    Args:
        function: The function.
        made: Functions rewritten so far that the step calls, None for one that is being rewritten;
            None for the step itself.
    """
    tree = _tree(function)
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    closure = dict(zip(function.__code__.co_freevars, cells, strict=True))
    outer = {**function.__globals__, **closure}
    found = _definition(function, tree)
    arguments = [*found.args.posonlyargs, *found.args.args]
    found.decorator_list, found.returns = [], None
    for argument in arguments:
        argument.annotation = None
    if found.args.defaults and made is not None:
        got = f"{function.__name__} with defaults, which a step calls"
        raise UserError(got, "a function without defaults", "pass it all of its arguments")
    found.args.defaults = []  # the loop passes all arguments
    _Numbers(outer, set(function.__code__.co_varnames)).visit(found)
    if arguments:
        found.body.insert(0, ast.parse(f"{REAL} = type({arguments[0].arg} + {ZERO})").body[0])
    helpers = {} if made is None else made
    names = {
        name: _helper(outer[name], helpers)
        for name in {n.id for n in ast.walk(found) if isinstance(n, ast.Name)} & set(outer)
    }
    names[ZERO] = np.float32(0)
    # Constants of the file are compiled in, so the function, the key of the cache, contains them.
    used = {k: v for k, v in names.items() if not callable(v) and not isinstance(v, ModuleType)}
    found.body.insert(0, ast.Expr(ast.Constant(repr(sorted(used.items())))))
    ast.fix_missing_locations(tree)
    # The file name given here names no file, so the cache reads none: `mpips.kernels.compiled`.
    exec(compile(tree, f"{function.__code__.co_filename} ({function.__name__})", "exec"), names)
    rebuilt: FunctionType = names[function.__name__]
    rebuilt.__annotations__ = {argument.arg: float for argument in arguments}
    return make_step(rebuilt)


def _tree(function: FunctionType) -> ast.Module:
    """Return the syntax tree of a function's source, with the line numbers of its file."""
    try:
        lines, first = inspect.getsourcelines(function)
    except OSError:
        got = f"{function.__name__} without source code"
        raise UserError(got, "a function in a file") from None
    # Within a class, a block keeps lines that begin at column 0: comments, parts of a docstring.
    inner = lines[0][0].isspace()
    tree = ast.parse("".join(["if True:\n" * inner, *lines]))
    ast.increment_lineno(tree, first - 1 - inner)
    return tree


def _definition(function: FunctionType, tree: ast.Module) -> ast.FunctionDef:
    found = next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)
    if found is None:
        got = f"{function.__name__} of {function.__module__}, which is no def"
        raise UserError(got, "a function that def makes", "write def step(w, g, /, lr)")
    if any(isinstance(node, (ast.Raise, ast.Assert)) for node in ast.walk(found)):
        got = f"{function.__name__} of {function.__module__}, which may raise"
        raise UserError(got, "numbers for any w and g", "return NaN, which ends the run")
    return found


def _helper(value: Any, made: dict[FunctionType, Kernel | None]) -> Any:
    """Return a value that a step uses; a user's function is rewritten for loops."""
    if not isinstance(value, FunctionType) or getattr(builtins, value.__name__, None) is value:
        return value
    if value.__module__.partition(".")[0] in ("numpy", "math", "numba"):
        return value
    if value not in made:
        made[value] = None
        made[value] = _compilable(value, made)
    elif made[value] is None:
        raise UserError(f"{value.__name__}, which calls itself", "a loop", "write it with range")
    return made[value]


class _Numbers(ast.NodeTransformer):
    """Gives the numbers in a function the type of its parameters.

    Args:
        outer: Values of global names and of closures, by name.
        own: Names of the function's parameters and local variables.
    """

    def __init__(self, outer: Mapping[str, Any], own: set[str]) -> None:
        self._outer, self._own = outer, own

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """Convert a number to the parameters' type."""
        return _converted(node.value, node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Replace the name of a constant of the file by its number."""
        own = node.id in self._own or not isinstance(node.ctx, ast.Load)
        return _converted(None if own else self._outer.get(node.id), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Replace a constant of a module, such as `math.pi`, by its number."""
        owner = self._outer.get(node.value.id) if isinstance(node.value, ast.Name) else None
        value = getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
        return _converted(value, node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """Leave constant exponents as they are: an integer power compiles to multiplications."""
        if isinstance(node.op, ast.Pow) and isinstance(node.right, ast.Constant):
            node.left = self.visit(node.left)
            return node
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Leave an index an integer."""
        node.value = self.visit(node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Leave the arguments of ``range`` integers."""
        if isinstance(node.func, ast.Name) and node.func.id == "range":
            return node
        return self.generic_visit(node)


def _converted(value: Any, node: ast.expr) -> ast.expr:
    """Return a number as an expression of the parameters' type; `node` itself for other values."""
    if type(value) not in (int, float):
        return node
    number = ast.copy_location(ast.Constant(value), node)
    return ast.copy_location(ast.Call(ast.Name(REAL, ast.Load()), [number], []), node)
