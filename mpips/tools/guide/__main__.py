"""The guide: ``python -m mpips guide`` lists its pages, and with ``TOPIC`` shows one."""

import sys
from collections.abc import Sequence
from pathlib import Path

from mpips.config import groups
from mpips.config.option import Option, default_text, metavar
from mpips.errors import UserError, answer, unknown

FOLDER = Path(__file__).resolve().parent
TOPICS = (  # in the order in which a newcomer may want them
    *(
        "why",
        "start",
        "modes",
        "concepts",
        "pytorch",
        "coming-from",
        "library",
        "your-model",
        "tables",
        "data",
    ),
    *("options", "checkpoints", "failures", "slurm", "several-nodes", "slow-links", "plan"),
    *("summary", "report", "replay", "troubleshooting", "benchmarks", "design"),
)
OPTIONS_HERE = "<!-- options -->"
USAGE = """usage: mpips guide [TOPIC]

Show what mpips can do and how, without a browser. Without TOPIC, list the topics. On a terminal the
Markdown is set by rich, where it is installed (pip install 'mpips[guide]').
"""


def headline(topic: str) -> str:
    """Return what a page is about, in a line."""
    with (FOLDER / f"{topic}.md").open() as page:
        return page.readline().removeprefix("# ").strip()


def page(topic: str) -> str:
    """Return a page as Markdown, with the tables in it that are made from the code.

    Raises:
        UserError: If there is no such page.
    """
    if topic not in TOPICS:
        raise unknown("topic", topic, TOPICS)
    return (FOLDER / f"{topic}.md").read_text().replace(OPTIONS_HERE, options_tables())


def options_tables() -> str:
    """Return all options of a job as Markdown: a table a group."""
    return "\n".join(
        f"## {group.capitalize()}\n\n| option | what it does | default |\n|---|---|---|\n"
        + "".join(map(_row, options))
        for group, options in groups().items()
    ).rstrip()


def _row(option: Option) -> str:
    """Return an option's row; a bar would end a cell."""
    names = [f"`{option.flag} {metavar(option)}".rstrip() + "`"]
    names += [f"`{option.negated}`"] if option.kind is bool else []
    modes = [f"mode {' or '.join(option.modes)}"] if option.modes else []
    legal = option.bound or (option.form if option.pattern else "")
    default = default_text(option)
    cells = [
        ", ".join(names),
        "; ".join(filter(None, [option.help, legal, *modes])),
        f"`{default}`" if "<" in default else default,  # else read as HTML
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def text(argv: Sequence[str]) -> str:
    """Return what a command line asks for.

    Raises:
        UserError: If it is wrong, or there is no such topic.
    """
    if "--help" in argv or "-h" in argv:
        return USAGE
    if not argv:
        return "".join(f"{topic:17s}{headline(topic)}\n" for topic in TOPICS)
    if len(argv) > 1:
        raise UserError(f"{len(argv)} words after guide", "one topic", "see --help")
    shown = page(argv[0].removesuffix(".md"))
    return on_terminal(shown) if sys.stdout.isatty() else shown


def on_terminal(markdown: str) -> str:
    """Return Markdown as rich sets it for this terminal; as it is where there is no rich."""
    try:
        from rich.console import Console
        from rich.markdown import Markdown
    except ImportError:
        return markdown
    console = Console()
    with console.capture() as captured:
        console.print(Markdown(markdown))
    return captured.get()


def main(argv: Sequence[str]) -> int:
    """Print it; returns the exit code."""
    return answer(text, argv)
