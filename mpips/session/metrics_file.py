"""The file ``metrics.jsonl``: one JSON object a line."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


class MetricsFile:
    """Appends rows; what cannot be written is kept, and written with a later row.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (closed by close)
        self._unwritten, self._failed = b"", False

    def append(self, row: Mapping[str, Any]) -> str | None:
        """Write a row; returns what `flush` does."""
        self._unwritten += f"{json.dumps(finite(row))}\n".encode()
        return self.flush()

    def flush(self) -> str | None:
        """Write what there is; returns why it cannot be written, the first time, else None."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) or 0 :]
        except OSError as problem:
            already, self._failed = self._failed, True
            return None if already else f"{self._file.name} cannot be written: {problem.strerror}"
        self._failed = False
        return None

    def reopen(self, path: Path) -> None:
        """Go on in another file: the one before is gone."""
        self._file.close()
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (closed by close)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def finite(value: Any) -> Any:
    """Return `value` with NaN and infinities as text: JSON has no words for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, np.generic):
        return finite(value.item())
    return value
