"""Pages of the guide, with tables generated from options and docstrings."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from mpips.config import groups
from mpips.config.option import Option, default_text, legal_text, metavar
from mpips.errors import unknown

FOLDER = Path(__file__).resolve().parent
PACKAGE = FOLDER.parents[1]
MARK = re.compile(r"<!-- (.+) -->")  # in a page: title of docstring sections, or "options"
ENTRY = re.compile(r"^ {4}(\S.*?): (.+(?:\n {6,}.+)*)$", re.M)
SECTIONS = {  # pages by section, in reading order for a newcomer
    "Begin": ("why", "start", "modes", "concepts"),
    "Train your model": (
        *("pytorch", "lightning", "coming-from", "library", "your-model", "tables", "data"),
    ),
    "Run it": (
        *("checkpoints", "failures", "slurm", "schedulers", "several-nodes", "containers"),
        "slow-links",
    ),
    "Look inside": ("plan", "report", "replay", "troubleshooting", "benchmarks"),
    "Reference": ("options", "summary", "errors", "environment"),
    "Contribute": ("design",),
}
TOPICS = tuple(topic for topics in SECTIONS.values() for topic in topics)


def headline(topic: str) -> str:
    """Return the title of a page."""
    with (FOLDER / f"{topic}.md").open() as page:
        return page.readline().removeprefix("# ").strip()


def page(topic: str) -> str:
    """Return a page as Markdown, with its generated tables.

    Raises:
        UserError: If there is no such page.
    """
    if topic not in TOPICS:
        raise unknown("topic", topic, TOPICS)
    return filled((FOLDER / f"{topic}.md").read_text())


def filled(page: str) -> str:
    """Replace the marks of a page, such as ``<!-- Environment -->``, by generated rows."""
    return MARK.sub(lambda mark: options() if mark[1] == "options" else rows(mark[1]), page)


def rows(title: str) -> str:
    """Return a row for each entry of the docstring sections of this title, as Markdown."""
    return "\n".join(_row(_code(name), text) for _, name, text in entries(title))


def entries(title: str) -> list[tuple[str, str, str]]:
    """Return the entries of all docstring sections of a title in the package.

    A section is a line with its title and a colon, and indented entries of the form ``name: text``.

    Returns:
        Path of the module, name and text of each entry. Entries of one module are in its order,
        entries of several modules are sorted by name.
    """
    found = [
        (str(path.relative_to(PACKAGE)), name, " ".join(text.replace("``", "`").split()))
        for path in sorted(PACKAGE.rglob("*.py"))
        for doc in _docstrings(path.read_text(), title)
        for name, text in ENTRY.findall(doc)
    ]
    return found if len({path for path, _, _ in found}) == 1 else sorted(found, key=lambda e: e[1])


def _docstrings(source: str, title: str) -> Iterator[str]:
    """Yield the docstring sections of a title in a module's source."""
    if f"{title}:\n" in source:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                doc = f"\n{ast.get_docstring(node) or ''}\n"
                yield re.split(r"\n(?=\S)", doc.partition(f"\n{title}:\n")[2], maxsplit=1)[0]


def options() -> str:
    """Return all options of a job as Markdown, with a table for each group."""
    return "\n\n".join(
        f"## {group.capitalize()}\n\n| option | what it does | default |\n|---|---|---|\n"
        + "\n".join(map(_option, options))
        for group, options in groups().items()
    )


def _option(option: Option) -> str:
    names = [f"{option.flag} {metavar(option)}".rstrip()]
    names += [option.negated] if option.kind is bool else []
    modes = [f"mode {' or '.join(option.modes)}"] if option.modes else []
    default = default_text(option)
    text = "; ".join(filter(None, [option.help, legal_text(option), *modes]))
    return _row(", ".join(map(_code, names)), text, _code(default) if "<" in default else default)


def _code(names: str) -> str:
    """Return a name, or each of several names separated by commas, as Markdown code."""
    return f"`{names if ' ' in names.replace(', ', '') else names.replace(', ', '`, `')}`"


def _row(*cells: str) -> str:
    """Return a row of a Markdown table, with bars in cells escaped."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
