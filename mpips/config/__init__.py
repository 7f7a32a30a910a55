"""What a job can say: its options, where they come from, and what makes them valid."""

from mpips.config.names import LEARNING_RATES, PULL_CODECS, SPARSE_PROBLEMS
from mpips.config.schema import (
    LAYOUT_FIELDS,
    OPTIONS,
    SESSION_FIELDS,
    Config,
    groups,
)

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
