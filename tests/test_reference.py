"""Reference: what the guide makes from the code is all there is in it."""

import ast
import inspect
import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from launch import ROOT, train

from mpips.checkpoint import run_folder
from mpips.errors import Exit
from mpips.tools.guide.pages import FOLDER, MARK, entries, filled
from mpips.tools.guide.site import API
from tests.test_imports import sources

# Rows -------------------------------------------------------------------------------------------


def documented(title: str) -> set[str]:
    """Return the names of all rows of a title."""
    return {name for _, names, _ in entries(title) for name in names.split(", ")}


def test_rows_are_made_of_docstrings() -> None:
    """Of each mark in a page; a name has one row."""
    marks = {mark for path in FOLDER.glob("*.md") for mark in MARK.findall(path.read_text())}
    assert {"options", "Environment", "Exit codes", "Files of a run"} <= marks
    for title in marks - {"options"}:
        names = [name for _, name, _ in entries(title)]
        assert names
        assert len(set(names)) == len(names), title
        assert filled(f"<!-- {title} -->").count("\n| ") == len(names) - 1
    assert filled("<!-- Exit codes -->").startswith("| `0` | Complete: `DONE` is in the run's")


# Exit codes -------------------------------------------------------------------------------------


def test_exit_codes_are_documented() -> None:
    assert documented("Exit codes") == {str(int(code)) for code in Exit}


def texts(tree: ast.AST) -> str:
    """Return the texts of a module but its own docstring, with a mark for what is filled in."""
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Constant | ast.JoinedStr)][1:]
    parts = [node.values if isinstance(node, ast.JoinedStr) else [node] for node in found]
    return "\n".join("".join(str(getattr(k, "value", "")) for k in each) for each in parts)


def test_documented_messages_are_those_of_the_code() -> None:
    """But for what stands for others' names and numbers."""
    for path, message, _ in entries("Messages"):
        said = texts(sources()[path.removesuffix(".py").replace("/", ".")])
        for piece in re.split(r"\b[A-Z]\b|\d+|\.\.\.|option |/dev/shm|/", message):
            assert piece.strip(" ,") in said, f"{path}: {message}"


# Environment ------------------------------------------------------------------------------------

NAMES = re.compile(  # of variables that stand in the source, which may only begin others
    r"(MPIPS|SLURM|SRUN|PMIX?|OMPI|MPIR_CVAR|I_MPI|OMP|OPENBLAS|MKL|PRTE_MCA|PL|XDG|MPI4PY|UCX|FI)_"
    r"|LAUNCHER|MPI_LOCAL|NUMBA_NUM|PYTHON"
)
BEGIN_OTHERS = {"OMPI_", "PMI_", "PMIX_", "PRTE_", "HYDRA_", "SLURM_ARRAY_", "MPI_LOCAL"}


def variables(tree: ast.AST) -> Iterator[str]:
    """Yield the variables of the environment that a module names, or reads."""
    for node in ast.walk(tree):
        found: list[Any] = []
        match node:
            case ast.Constant(value=str() as text) if NAMES.match(text):
                found = [text]
            case ast.JoinedStr(values=[ast.Constant(value=text), *_]) if NAMES.match(text):
                found = [text]
            case ast.Subscript(slice=ast.Constant(value=text)):
                found = [text] * (ast.unparse(node.value) == "os.environ")
            case ast.Call(args=args) if ast.unparse(node.func).startswith("os.environ."):
                found = [getattr(arg, "value", "") for arg in args[:1]]
                found += [keyword.arg for keyword in node.keywords]
        yield from (name for name in found if re.fullmatch(r"[A-Z]\w*", str(name)))


def test_the_environment_is_documented() -> None:
    """Each variable that a module or a job script names; and no other."""
    found = {name for tree in sources().values() for name in variables(tree)}
    for script in (ROOT / "slurm").iterdir():
        code = re.sub(r"(?m)^#.*|_HET_GROUP_\d|BASH_SOURCE", "", script.read_text())
        found |= set(re.findall(r"(?:\$\{?|export |unset )([A-Z]\w+)", code))
    known = documented("Environment")
    assert found - known <= BEGIN_OTHERS
    assert known - found == set()


# What a run leaves ------------------------------------------------------------------------------

BY_NAME = re.compile(r"(tables|per_server\.rows_\w+)\.[^.]+")  # of a table


def fields(value: Any, at: str = "") -> Iterator[str]:
    """Yield the fields of a summary, with those that they are in; of lists those of elements."""
    inner = [("", each) for each in value] if isinstance(value, list) else []
    if isinstance(value, dict) and at != "inject_delay":
        inner = [(f".{name}", each) for name, each in value.items()]
    if not any(isinstance(each, dict | list) or name for name, each in inner):
        yield BY_NAME.sub(r"\1", at.removeprefix("."))
    else:
        for name, each in inner:
            yield from fields(each, at + name)


def check_left(out: Path) -> None:
    """Check that the reference has all fields of a run's files."""
    known = documented("Fields of summary.json")
    for name in set(fields(json.loads((out / "summary.json").read_text()))) - known:
        assert any(k.startswith(f"{name}.") for k in known), name  # null, or of no length
    kinds = {kind: text for _, kind, text in entries("Lines of metrics.jsonl")}
    for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()):
        own = {"worker"} if row["kind"] == "log" else set(row)  # a program has its own names
        told = set(re.findall(r"`(\w+)`", kinds[row["kind"]]))
        assert own <= told | {"kind", "time_s", "step"}, row


def test_fields_and_kinds_are_those_of_the_code() -> None:
    """Also of what happens in no run of this test: a server that died."""
    said = "\n".join(map(texts, sources().values())).splitlines()
    names = {part for name in documented("Fields of summary.json") for part in name.split(".")}
    assert names <= set(said)
    heard = {"eval", "log"}
    for tree in sources().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".event"):
                heard |= {k.value for k in node.args[:1] if isinstance(k, ast.Constant)}
    assert heard == documented("Lines of metrics.jsonl")


def test_files_are_those_of_the_code() -> None:
    known = {name.rstrip("/") for name in documented("Files of a run")}
    constants = {v for k, v in vars(run_folder).items() if k.isupper() and isinstance(v, str)}
    assert constants | run_folder.EARLY <= known
    places = {re.sub("N$", "7", name) for name in known if "places" in name}
    assert {name for name in places if run_folder.PLACES.fullmatch(name)} == places
    assert len(known - constants - run_folder.EARLY) == len({*places, "report.html"})


@pytest.mark.launch
@pytest.mark.one_mpi
def test_what_a_run_leaves_is_documented(tmp_path: Path) -> None:
    """With each option that adds a file; and the fields of tables, in rounds."""
    full = "--servers 1 --epochs 2 --trace --record --read consistent --evaluators 1 --keep-best"
    table = "--mode sync --problem factorization_machine --factors 2 --epochs 1 --optimizer adagrad"
    table += f" --dataset {ROOT / 'jobs/clicks.svm'}"
    for ranks, name, job in ((4, "full", full), (2, "table", table)):
        train(ranks, "--quiet", "--out", name, *job.split(), cwd=tmp_path).check()
        check_left(tmp_path / name)
    known = {name.rstrip("/") for name in documented("Files of a run")}
    left = {path.name for path in (tmp_path / "full").iterdir()}
    assert {"trace", "record", "best", "DONE", "summary.json", "config.toml"} <= left <= known


# The API ----------------------------------------------------------------------------------------


ON_RANKS = (  # classes whose methods a rank calls in a run, and what of them is for the run itself
    *("mpips.Store", "mpips.Result", "mpips.Worker", "mpips.torch.Worker", "mpips.torch.Embedding"),
    *("mpips.torch.EmbeddingBag", "mpips.lightning.Strategy", "mpips.lightning.FabricStrategy"),
)
INNER = {"bind", "extra_repr", "drop_gradients", "module_to_device", "model_to_device"}
INNER |= {"process_dataloader", "on_train_start", "on_train_end", "backward"}


@pytest.mark.parametrize("module", API)
def test_public_names_have_documentation(module: str) -> None:
    """Each name that a module exports; of methods that a rank calls, who waits for whom."""
    if module != "mpips":
        pytest.importorskip(module.removeprefix("mpips."))
    found = import_module(module)
    for name in found.__all__:
        thing = getattr(found, name)
        assert inspect.getdoc(thing), f"{module}.{name}"
        on_ranks = inspect.isclass(thing) and f"{module}.{name}" in ON_RANKS
        own = [c for c in thing.__mro__ if c.__module__.startswith("mpips.")] if on_ranks else []
        for method, value in [pair for kind in own for pair in vars(kind).items()]:
            if inspect.isroutine(value) and method[0] != "_" and method not in INNER | {"close"}:
                assert "Collective" in (inspect.getdoc(value) or ""), f"{module}.{name}.{method}"
