"""Command line of the guide: its topics, a page, or the site."""

import sys
from collections.abc import Sequence

from mpips.errors import UserError, answer
from mpips.tools.guide.pages import TOPICS, headline, page

USAGE = """usage: mpips guide [TOPIC]
       mpips guide --html DIR
       mpips guide --serve

Show what mpips can do and how, without a browser. Without TOPIC, list the topics. On a terminal the
Markdown is set by rich, where it is installed (pip install 'mpips[guide]').

--html DIR  write a site with search and the API into DIR (pip install 'mpips[docs]')
--serve     show that site on this host
"""


def text(argv: Sequence[str]) -> str:
    """Return what a command line asks for.

    Raises:
        UserError: If it is wrong, or there is no such topic.
    """
    if "--help" in argv or "-h" in argv:
        return USAGE
    if not argv:
        return "".join(f"{topic:17s}{headline(topic)}\n" for topic in TOPICS)
    if argv[0] in ("--html", "--serve"):
        return _site(argv)
    if len(argv) > 1:
        raise UserError(f"{len(argv)} words after guide", "one topic", "see --help")
    shown = page(argv[0].removesuffix(".md"))
    return on_terminal(shown) if sys.stdout.isatty() else shown


def _site(argv: Sequence[str]) -> str:
    from mpips.tools.guide import site

    if (len(argv) == 2) != (argv[0] == "--html"):
        raise UserError(" ".join(argv), "--html DIR, or --serve", "see --help")
    return site.build(argv[1]) if len(argv) == 2 else site.serve()


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
