"""Options of a job: definition, sources and validation."""

from mpips.config.schema import OPTIONS, Config, groups

__all__ = ["OPTIONS", "Config", "groups"]
