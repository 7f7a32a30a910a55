"""What a job can say: its options, where they come from, and what makes them valid."""

from mpips.config.schema import (
    LAYOUT_FIELDS,
    LEARNING_RATES,
    OPTIONS,
    PULL_CODECS,
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
    "Config",
    "groups",
]
