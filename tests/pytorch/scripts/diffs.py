"""Scripts and what they are converted to, both in a diff that has all lines."""

from pathlib import Path


def sides(diff: str) -> tuple[str, str]:
    """Return the two programs of a diff."""
    before, after = (
        "".join(line[1:] or line for line in diff.splitlines(True) if line[0] in f" {sign}\n")
        for sign in "-+"
    )
    return before, after


def script(name: str, converted: bool = False) -> str:
    """Return a script of this folder as people have it, or as it is converted."""
    return sides(Path(__file__).with_name(f"{name}.diff").read_text())[converted]
