"""Guide of mpips: ``mpips guide [TOPIC]``.

Shows a page of the guide without a browser, or without TOPIC a list of the pages. On a terminal,
the page is formatted by rich if that is installed (pip install 'mpips[guide]').
"""

import sys
from collections.abc import Sequence

from mpips.config.jobfile import Parser, verbatim
from mpips.errors import UserError, answer
from mpips.tools.guide.pages import TOPICS, headline, page


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = verbatim("mpips guide", __doc__)
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help="show this page")
    site = parser.add_mutually_exclusive_group()
    site.add_argument("--html", metavar="DIR", help="write a site with search and the API into DIR "
                      "(pip install 'mpips[docs]')")  # fmt: skip
    site.add_argument("--serve", action="store_true", help="show that site on this host")
    return parser


def text(argv: Sequence[str]) -> str:
    """Return the output for a command line.

    Raises:
        UserError: If the command line is wrong, or there is no such topic.
    """
    args = make_parser().parse_args(argv)
    if args.html or args.serve:
        from mpips.tools.guide import site

        if args.topic:
            raise UserError(f"topic {args.topic!r} beside a site", "one of them", "see --help")
        return site.build(args.html) if args.html else site.serve()
    if args.topic is None:
        return "".join(f"{topic:17s}{headline(topic)}\n" for topic in TOPICS)
    shown = page(args.topic.removesuffix(".md"))
    return on_terminal(shown) if sys.stdout.isatty() else shown


def on_terminal(markdown: str) -> str:
    """Return Markdown formatted by rich for this terminal; unchanged if rich is not installed."""
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
    """Print the output, and return the exit code."""
    return answer(text, argv)
