"""Pages of the guide, and the tables in them that are made from the code."""

from pathlib import Path

from mpips.config import groups
from mpips.config.option import Option, default_text, metavar
from mpips.errors import unknown

FOLDER = Path(__file__).resolve().parent
SECTIONS = {  # in the order in which a newcomer may want them
    "Begin": ("why", "start", "modes", "concepts"),
    "Train your model": (
        *("pytorch", "lightning", "coming-from", "library", "your-model", "tables", "data"),
    ),
    "Run it": ("options", "checkpoints", "failures", "slurm", "several-nodes", "slow-links"),
    "Look inside": ("plan", "summary", "report", "replay", "troubleshooting", "benchmarks"),
    "Contribute": ("design",),
}
TOPICS = tuple(topic for topics in SECTIONS.values() for topic in topics)
OPTIONS_HERE = "<!-- options -->"


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
