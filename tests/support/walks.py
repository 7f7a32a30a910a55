"""Call paths of a job: which functions of mpips a rank enters, and those of the design page."""

import re
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType

from mpips.tools.guide.__main__ import page

# Modules that a plain asynchronous job does not import: of ranks that die, tables, first-N rounds,
# the replay log.
FEATURES = ("failover.", "tables.", "ps.first_n", "ps.replay_log")
PACKAGE = Path(__file__).parents[2] / "mpips"
Name = tuple[str, str]  # of a function: its file, and its qualified name
HEADING = re.compile(r"^\*\*(.+?)\*\*", re.MULTILINE)
FILE = re.compile(r"`(mpips/[\w/]+\.py)`\s+\(([^)]+)\)")
SPAN = re.compile(r"`([^`]+)`")


def paths() -> dict[str, list[list[Name]]]:
    """Return the call paths of the design page by their headings: one a line, outermost first."""
    section = page("design").partition("\n## Call paths\n")[2].partition("\n## ")[0]
    _, *rest = HEADING.split(section)
    lines = [re.split(r"^\d\. ", text, flags=re.MULTILINE)[1:] for text in rest[1::2]]
    found = [[_names(line) for line in numbered] for numbered in lines]
    return dict(zip(rest[::2], found, strict=True))


def _names(line: str) -> list[Name]:
    return [(file, name) for file, names in FILE.findall(line) for name in SPAN.findall(names)]


class Walk:
    """Notes depth and name of functions of mpips that this thread enters in a ``with`` block."""

    def __init__(self, names: Collection[Name] | None = None) -> None:
        self.entries: list[tuple[int, Name]] = []
        self._names, self._depth = names, 0
        self._known: dict[CodeType, Name | None] = {}

    def __enter__(self) -> "Walk":
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code not in self._known:
            path = Path(code.co_filename)
            inside = path.is_relative_to(PACKAGE)
            file = str(path.relative_to(PACKAGE.parent)) if inside else ""
            self._known[code] = (file, code.co_qualname) if inside else None
        name = self._known[code]
        if name is None:
            return
        if event == "call":
            if self._names is None or name in self._names:
                self.entries.append((self._depth, name))
            self._depth += 1
        elif event == "return":
            self._depth -= 1

    def within(self, function: Name) -> Iterator[list[Name]]:
        """Yield what each call of a function enters, itself first."""
        for first, (depth, name) in enumerate(self.entries):
            if name == function:
                last = first + 1
                while last < len(self.entries) and self.entries[last][0] > depth:
                    last += 1
                yield [name for _, name in self.entries[first:last]]

    def follows(self, path: Sequence[Name]) -> bool:
        """Whether some call of the first function enters the others in their order."""
        for entered in self.within(path[0]):
            rest = iter(entered)
            if all(name in rest for name in path):
                return True
        return False
