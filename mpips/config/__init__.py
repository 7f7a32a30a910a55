"""Options of a job: definition, sources and validation."""

from mpips.config.option import Option
from mpips.config.schema import OPTIONS, Config

__all__ = ["OPTIONS", "Config", "groups"]


def groups() -> dict[str, list[Option]]:
    """Return the options by group, in the order of definition."""
    by_group: dict[str, list[Option]] = {}
    for option in OPTIONS.values():
        by_group.setdefault(option.group, []).append(option)
    return by_group
