"""Options of a job: definition, sources and validation."""

from mpips.config.names import (
    LAYOUT_FIELDS,
    LEARNING_RATES,
    PULL_CODECS,
    SESSION_FIELDS,
    SPARSE_PROBLEMS,
)
from mpips.config.schema import OPTIONS, Config, groups

__all__ = [
    "LAYOUT_FIELDS",
    "LEARNING_RATES",
    "OPTIONS",
    "PULL_CODECS",
    "SESSION_FIELDS",
    "SPARSE_PROBLEMS",
    "Config",
    "groups",
]
