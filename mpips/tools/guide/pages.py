"""Pages of the guide, by topic and section."""

from pathlib import Path

from mpips.errors import unknown
from mpips.tools.guide.reference import filled

FOLDER = Path(__file__).resolve().parent
SECTIONS = {  # in the order in which a newcomer may want them
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
    return filled((FOLDER / f"{topic}.md").read_text())
