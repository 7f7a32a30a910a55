"""Options of a job: definition, sources and validation."""

from mpips.config.option import Option
from mpips.config.schema import OPTIONS, Config

__all__ = ["OPTIONS", "Config", "groups"]


def groups() -> dict[str, list[Option]]:
    """Return the options by group, in their order."""
    found: dict[str, list[Option]] = {}
    for option in OPTIONS.values():
        found.setdefault(option.group, []).append(option)
    return found
