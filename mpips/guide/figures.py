"""The tables of measured figures in README and guide: ``python -m mpips.guide.figures`` makes them.

``figures.json`` has the figures by name, in the fields of the bench's JSON and rounded as they are
shown, and the tables: on which page, under which head, and which figures stand on each line.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from mpips.config.jobfile import PACKAGE
from mpips.guide.pages import FOLDER

FIGURES = FOLDER / "figures.json"
FIELD = re.compile(r"{(.+?)}")


def read() -> dict[str, Any]:
    """Return ``figures.json``; numbers keep the digits that they are written with."""
    found: dict[str, Any]
    found = json.loads(FIGURES.read_text(), parse_float=Decimal, parse_int=Decimal)
    return found


def path_of(page: str) -> Path:
    """Return the file of a page of the guide, or of README."""
    return PACKAGE.parent / "README.md" if page == "README" else FOLDER / f"{page}.md"


def renewed(page: str, text: str) -> str:
    """Return the text of a page with the tables that the figures make."""
    everything = read()
    for table in everything["tables"]:
        if table["page"] == page:
            head = f"| {' | '.join(table['head'])} |\n"
            rows = [_row(table, line, everything["figures"]) for line in table["lines"]]
            made = f"{head}{'|---' * len(table['head'])}|\n{''.join(rows)}"
            before, found, behind = text.partition(head)
            assert found, f"{page} has no table {head}"
            text = before + made + re.sub(r"\A(\|.*\n)+", "", behind)
    return text


def _row(table: Mapping[str, Any], line: Sequence[Any], figures: Mapping[str, Any]) -> str:
    """Return a line of a table: its labels, and each column of the figures named behind them."""
    *labels, names = line
    shown = [figures[name] for name in names]
    cells = [FIELD.sub(lambda m: _joined(shown, m[1]), column) for column in table["columns"]]
    return f"| {' | '.join([*labels, *cells])} |\n"


def _joined(figures: Sequence[Mapping[str, Any]], field: str) -> str:
    """Return a field of several figures, once where it is the same of all."""
    words = [_word(figure.get(field, "")) for figure in figures]
    return " / ".join(words if len(set(words)) > 1 else words[:1])


def _word(value: Any) -> str:
    return f"{value:,}" if isinstance(value, Decimal) else str(value)


def main() -> int:
    """Write the tables into the pages of this clone; returns the exit code."""
    for page in {table["page"]: None for table in read()["tables"]}:
        path = path_of(page)
        path.write_text(renewed(page, path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
