"""Options of the doctor."""

from dataclasses import dataclass
from pathlib import Path

START_S = 180.0


@dataclass(frozen=True)
class Options:
    """What to examine.

    Attributes:
        node_size: Treat so many consecutive ranks as a node; 0 for the real nodes.
        out: Folder that runs go to; empty for the default.
        json: File for the findings, or None.
        limit_s: Seconds that a check may take.
        parameters: Of the model that windows and checkpoints are to be large enough for.
    """

    node_size: int = 0
    out: str = ""
    json: Path | None = None
    limit_s: float = 30.0
    parameters: int = 10_000_000

    @property
    def start_s(self) -> float:
        """Seconds that loading the packages and starting MPI may take."""
        return max(self.limit_s, START_S)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint of that model, with the two slots of Adam."""
        return self.parameters * 4 * (1 + 2)
