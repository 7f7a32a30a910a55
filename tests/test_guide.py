"""README and guide: every block in them runs, or is checked; links, topics and names are there.

By their language: ``bash`` lines run in the order of the page, and so do ``python`` blocks, each
saved as its first line says, unless they call ``mpips.run``: a ``bash`` line after them does. Of
``console`` blocks README's first one runs. ``sh`` lines are read and not run. ``toml`` is a job
file, ``text`` output, a ``diff`` is of two programs, of which the second is a ``python`` block.
"""

import argparse
import json
import re
import shlex
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import ROOT, python, run

from mpips.__main__ import COMMANDS
from mpips.config import OPTIONS
from mpips.config.command_line import FLAGS, QUESTIONS, parse_command_line
from mpips.config.jobfile import from_toml, read_toml, resolve
from mpips.tools.guide.__main__ import main
from mpips.tools.guide.pages import FOLDER, TOPICS, page
from mpips.tools.guide.site import API
from tests.pytorch.scripts.diffs import sides
from tests.test_reference import check_left

PAGES = {"README": ROOT / "README.md", **{topic: FOLDER / f"{topic}.md" for topic in TOPICS}}
LONG = (
    *("start", "coming-from", "pytorch", "lightning", "library", "options", "slow-links", "data"),
    *("tables", "report", "plan", "your-model", "replay"),
)
LANGUAGES = {"bash", "sh", "console", "python", "toml", "text", "diff"}
INSTALL = re.compile(r"^(git clone|python -m venv|pip install|pip wheel) .*?( && (?=mpirun)|$)")
SPAN = re.compile(r"`([^`]+)`")
STARTS_RANKS = re.compile(r"\b(mpips|mj|mt)\.(run|Store|lightning\.\w+)\(", re.M)
FOREIGN = {  # options of other programs
    *("--oversubscribe", "--mca", "--bind-to", "--mpi", "--cpu-bind", "--ntasks", "--nodes"),
    *("--mem", "--mem-per-cpu", "--shm-size", "--cpus-per-task", "--export"),
    *("--map-by", "--with-mpi", "--no-binary", "--no-deps", "--force-reinstall", "--max-restarts"),
    *("--home", "--join", "--join-ct", "--bind", "--parent", "--me", "--job-name"),
}


def text(name: str) -> str:
    return PAGES[name].read_text()


def blocks(name: str, *languages: str) -> list[tuple[str, str]]:
    """Return the blocks of a page in some languages, each with its language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text(name), re.M | re.S)
    assert {language for language, _ in found} <= LANGUAGES, f"{name}: {found}"
    return [(language, code) for language, code in found if not languages or language in languages]


def lines(name: str, *languages: str) -> list[str]:
    every = [line for _, code in blocks(name, *languages) for line in code.splitlines()]
    return [re.sub(r"\s+#.*", "", line) for line in every if line.strip()]


def prose(name: str) -> str:
    """Return a page without its blocks, and with spans that go over the end of a line joined."""
    return " ".join(re.sub(r"^```.*?^```$", "", text(name), flags=re.M | re.S).split())


# The command.


def test_topics_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == set(TOPICS)
    assert main([]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told] == list(TOPICS)
    assert min(len(line.split()) for line in told) > 3
    assert max(map(len, told)) <= 100


@pytest.mark.parametrize("topic", TOPICS)
def test_a_page_is_shown(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    for word in (topic, f"{topic}.md"):
        assert main([word]) == 0
        assert capsys.readouterr().out == page(topic)
    assert f"(mpips/tools/guide/{topic}.md)" in text("README")


def test_what_is_no_topic(capsys: pytest.CaptureFixture[str]) -> None:
    known = ", ".join(sorted(TOPICS))
    for words, error in (
        ("slum", f"unknown topic 'slum', expected one of {known}; did you mean 'slurm'?"),
        ("data slurm", "command line: unrecognized arguments: slurm, expected what --help lists"),
    ):
        assert main(words.split()) == 2
        assert capsys.readouterr().err == f"mpips: {error}\n"


def test_options_are_those_of_the_code() -> None:
    """Each once, with what ``--help`` says; the raw file names the command that shows them."""
    shown = page("options")
    rows = re.findall(r"^\| `(--[\w-]+).*", shown, re.M)
    assert rows == [option.flag for option in OPTIONS.values()]
    assert all(option.help.replace("|", "\\|") in shown for option in OPTIONS.values())
    assert "| `--seed N` | seed of initial parameters and sample order; >= 0 | 0 |" in shown
    assert "--share-pulls`, `--no-share-pulls`" in shown
    assert "| `--out DIR` | folder of the run | `runs/<problem>-<mode>-<time>` |" in shown
    widths = {len(re.findall(r"(?<!\\)\|", row)) for row in re.findall(r"^\|.*", shown, re.M)}
    assert widths == {4}
    assert "`mpips guide options`" in prose("options")


def test_the_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is built without a warning, has every page once, a search index and the public names."""
    pytest.importorskip("material", reason="needs the extra docs")
    pytest.importorskip("mkdocstrings", reason="needs the extra docs")
    index, gone = tmp_path / "site/search/search_index.json", tmp_path / "site/gone.html"
    for path in (index, gone):  # of one that is there
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert main(["--html", str(tmp_path / "site")]) == 0
    assert not gone.exists()
    assert "index.html" in capsys.readouterr().out
    places = {entry["location"] for entry in json.loads(index.read_text())["docs"]}
    assert {f"{topic}.html" for topic in TOPICS} <= places
    assert {f"api-{k}.html#{part}" for k, parts in API.items() for part in parts} <= places
    assert {"api-mpips.html#mpips.run", "api-mpips.torch.html#mpips.torch.Worker.once"} <= places
    mine = tmp_path / "mine" / "thesis.tex"
    mine.parent.mkdir()
    mine.touch()
    assert main(["--html", str(mine.parent)]) == main(["--html"]) == main(["--serve", "me"]) == 2
    assert mine.exists()


# What the pages say.


def test_the_readme_is_short_and_its_program_runs() -> None:
    lines_of_start = {line for _, code in blocks("start", "python") for line in code.splitlines()}
    ((_, code),) = blocks("README", "python")
    assert {*code.splitlines()} <= lines_of_start, "the README's program is a part of the first"
    assert len(text("README").splitlines()) <= 120


def anchors(path: Path) -> set[str]:
    heads = re.findall(
        r"^#+ (.*)", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", text(name))
    for target in targets:
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = PAGES[name].parent / file if file else PAGES[name]
        assert path.exists(), target
        installed = name == "README" or path.resolve().is_relative_to(ROOT / "mpips")
        assert installed, f"{target} is not installed beside {name}"
        assert not anchor or anchor in anchors(path), target


def parser_of(name: str) -> Any:
    """Return the parser of a command of mpips, or of another module; None where it has none."""
    module = import_module(f"mpips.{COMMANDS[name][0]}" if name in COMMANDS else name)
    if hasattr(module, "__path__"):
        module = import_module(f"{module.__name__}.__main__")
    return module.make_parser() if hasattr(module, "make_parser") else None


def known_flags() -> set[str]:
    """Return every option of every command."""
    parsers = list(filter(None, map(parser_of, (*COMMANDS, "tests.chaos", "benchmarks"))))
    found = {option.flag for option in (*OPTIONS.values(), *QUESTIONS.values())} | set(FLAGS)
    found |= {option.negated for option in OPTIONS.values() if option.kind is bool}
    while parsers:
        for action in parsers.pop()._actions:
            found |= set(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return found


def check_names(words: str, known: set[str], always: bool) -> None:
    """Check that a command of ours exists; and its options, or `always` those of any command."""
    command = re.search(r"(?:^|\s)(?:python -m mpips\.|mpips )(\w+)", words)
    assert command is None or command[1] in COMMANDS, words
    if command or always:
        assert set(re.findall(r"(?<!\S)--[a-z][\w-]*", words)) <= known, words


@pytest.mark.parametrize("name", PAGES)
def test_named_options_and_commands_exist(name: str) -> None:
    known = known_flags() | FOREIGN
    for span in SPAN.findall(prose(name)):
        check_names(span, known, always=span.startswith("--"))


def test_where_is_what() -> None:
    """The paths that the design names exist, and the names behind each are in that file."""
    spans = SPAN.findall(prose("design").partition("## Where is what")[2].partition("## Tests")[0])
    paths = [s for s in spans if re.fullmatch(r"(mpips|tests|jobs|slurm)/[\w./-]*", s)]
    assert len(paths) >= 20
    rooms = {f"mpips/{path.parent.name}/" for path in (ROOT / "mpips").glob("*/__init__.py")}
    assert rooms <= set(paths), "a room is left out"
    source = ""
    for span in spans:
        if span in paths:
            path = ROOT / span
            assert path.exists(), span
            source = path.read_text() if path.is_file() else ""
        elif source and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)?", span):
            assert span.rpartition(".")[2] in source, f"{span} behind {path}"


# What the pages tell to run.


def check(line: str, folder: Path) -> None:
    words = shlex.split(INSTALL.sub("", line))
    if words[0] == "mpirun":
        assert (words[1], words[3]) == ("-n", "python")
        run(int(words[2]), words[4:], folder, timeout_s=120).check()
        return
    assert words[0] == "python"
    python(*words[1:], cwd=folder)


@pytest.mark.launch
@pytest.mark.one_mpi  # `.ci/run` starts the README's commands with each
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name in LONG))
        for name in PAGES
        if blocks(name, "bash", "python")
    ],
)
def test_page(name: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    for language, code in blocks(name, "bash", "python", "console", "diff"):
        if language == "diff":
            before, code = sides(code)
            compile(before, name, "exec")  # a program of a library that is not installed
        if language in ("python", "diff"):
            file = code.splitlines()[0].removeprefix("# ")
            (tmp_path / file).write_text(code)
            if not STARTS_RANKS.search(code):  # those are run by the line of mpirun after them
                python(file, cwd=tmp_path)
        elif language == "bash":
            for line in code.splitlines():
                if not INSTALL.match(line):  # README's first line with another MPI
                    check(line, tmp_path)
        elif name == "README":
            check(code.splitlines()[0].removeprefix("$ "), tmp_path)
    for summary in tmp_path.rglob("summary.json"):
        check_left(summary.parent)
    if name == "pytorch":
        check_beside_ddp(tmp_path)
    if name == "your-model":
        weights = np.load(tmp_path / "l1.npz")
        assert np.allclose(weights["params/w"], [1, 2, 3, 4], atol=0.1)
        assert np.allclose(weights["params/b"], 5, atol=0.1)


# What a tracker's callback stands in: a tracker of a few lines, and a run.
WANDB = """
run = None
def init(project):
    global run
    run = project
def log(metrics, step):
    assert run and all(type(value) is float for value in metrics.values())
    print("told", step, flush=True)
"""
TRACKED = """
import numpy as np
import mpips
x, y = np.ones((8, 4), "f4"), np.zeros(8, "f4")
params = {"w": np.ones(4, "f4")}
def mean_loss(params, batch):
    return {"loss": float(np.mean((batch.x @ params["w"] - batch.y) ** 2))}
def train(worker):
    for batch in worker.batches((x, y), batch_size=4, epochs=4):
        worker.grads["w"][:] = 1.0
        worker.push(1.0)
"""


def test_examples_pass_their_exit_code_on() -> None:
    """In the guide, the documentation and ``jobs/``: a job script knows what became of the run."""
    modules = [ROOT / "mpips" / name / "__init__.py" for name in ("", "library", "torch", "jax")]
    texts = [code for name in PAGES for _, code in blocks(name, "python", "diff", "text")]
    texts += [path.read_text() for path in (*modules, *(ROOT / "jobs").glob("*.py"))]
    runs = re.compile(r"(?<![`\w])(mpips|mpips\.torch|mt|mj)\.run\(\s*\w")
    silent = [text for text in texts if runs.search(text) and "result.code" not in text]
    assert not silent, "\n\n".join(silent)


@pytest.mark.launch
@pytest.mark.one_mpi
def test_the_callback_of_a_tracker(tmp_path: Path) -> None:
    """As the guide has it: on one rank, each evaluation."""
    ((_, code),) = (block for block in blocks("report", "text") if "mpips.Callback" in block[1])
    (tmp_path / "tracked.py").write_text(f"{TRACKED}\n{code}")
    (tmp_path / "wandb.py").write_text(WANDB)
    output = run(2, ["tracked.py"], tmp_path).check().output
    assert output.count("told ") in (4, 5), output  # or of the final parameters too


def check_beside_ddp(folder: Path) -> None:
    """Check that both scripts of the diff learn, and that one is the other but for a few lines."""
    torch = pytest.importorskip("torch")
    ((_, diff),) = blocks("pytorch", "diff")
    ddp, ours = sides(diff)
    assert ours == (folder / "with_mpips.py").read_text()
    (folder / "with_ddp.py").write_text(ddp)
    new = {line.strip() for line in ours.splitlines()} - {line.strip() for line in ddp.splitlines()}
    assert len({line for line in new if line and not line.startswith("#")}) <= 12
    module = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    python(*module, "with_ddp.py", cwd=folder)
    points = torch.randn(512, 20, generator=torch.Generator().manual_seed(0))
    for script in ("with_ddp", "with_mpips"):
        state = torch.load(folder / f"{script}.pt")
        hidden = torch.relu(points @ state["0.weight"].T + state["0.bias"])
        found = (hidden @ state["2.weight"].T + state["2.bias"]).argmax(1)
        assert (found == (points.sum(1) > 0)).float().mean() > 0.97, script


OURS = re.compile(r"python3? -m mpips\.train(?P<words>[^>|;]*)")


@pytest.mark.parametrize("name", [name for name in PAGES if blocks(name, "sh", "toml", "console")])
def test_what_does_not_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options and commands are known, files are there, and what trains is a whole command line."""
    monkeypatch.chdir(ROOT)
    known = known_flags() | FOREIGN
    for line in lines(name, "sh"):
        check_names(line, known, always=not INSTALL.match(line))
        for file in re.findall(r"(?<!\S)(?:jobs|slurm)/[\w./-]+", line):
            assert file == "slurm/site.sh" or Path(file).is_file(), line
        if command := OURS.search(line):
            words = parse_command_line(shlex.split(command["words"]))
            resolve(words.options, read_toml(words.job) if words.job else None)
    for _, code in blocks(name, "toml"):
        assert from_toml(code)
    for _, code in blocks(name, "console"):
        line = INSTALL.sub("", code.splitlines()[0].removeprefix("$ "))
        assert re.match(r"(mpirun -n \d+ )?python -m mpips(\.train| doctor)( |$)", line)
