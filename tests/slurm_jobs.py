"""Jobs in the queue of a test SLURM, and what the tests of the job scripts share."""

import re
from pathlib import Path

from launch import ROOT, until
from runs import MODELS, list_checkpoints
from slurm_cluster import SlurmCluster

SCRIPTS = ROOT / "slurm"
TRAIN = str(SCRIPTS / "train.sbatch")
LAUNCHERS = ("srun", "mpirun")
TWO_BY_TWO = ("--nodes=2", "--ntasks-per-node=2", "--mem-per-cpu=600M", "--time=5")
# 90 rounds an epoch, of 0.2 s while a file called hold is there; `mlp` does the same without.
SYNC = ("--mode", "sync", "--batch-size", "4", "--hidden", "16", "--eval-every", "0")
HELD = ("--problem", f"{MODELS}:HeldMLP", *SYNC, "--checkpoint-every", "1")
TEN = ("--epochs", "10", "--seed", "3")
HOLDS = "bitwise equality with an uninterrupted run holds"


class Submitted:
    """A job in the queue, its log and its run."""

    def __init__(self, slurm: SlurmCluster, folder: Path, *words: str, launcher: str = "srun"):
        self.slurm, self.folder = slurm, folder
        self.id = slurm.submit(f"--export=ALL,LAUNCHER={launcher}", *words, cwd=folder)
        self.out = folder / "runs" / f"mpips-{self.id}"

    def log(self) -> str:
        path = self.folder / f"mpips-{self.id}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_until_requeued(self, restarts: int = 1) -> None:
        until(lambda: self.slurm.show(self.id).get("Restarts") == f"{restarts}", 90, self.told)

    def wait_until_saved(self, restarts: int = 0) -> None:
        """Wait until it has gone on so often, and has saved more than it began with."""

        def saved() -> bool:
            steps = self.resumed_steps()
            return len(steps) == restarts and newest_step(self.out) > max(steps, default=0)

        until(saved, 120, self.told)

    def wait(self, state: str = "COMPLETED", timeout_s: float = 150) -> dict[str, str]:
        """Wait for the end, which must be `state`; returns what SLURM says of the job."""
        found = self.slurm.wait(self.id, timeout_s, self.log)
        assert found == state, self.told()
        return self.slurm.show(self.id)

    def resumed_steps(self) -> list[int]:
        """Return the steps at which its runs went on."""
        return [int(s) for s in re.findall(r"resumed at step (\d+)", self.log())]

    def told(self) -> str:
        return f"{self.slurm.show(self.id)}\n{self.log()}\n{self.slurm.logs()}"


def newest_step(out: Path) -> int:
    """Return the step of the newest committed checkpoint, -1 if there is none."""
    whole = [p for p in list_checkpoints(out) if (p / "index.h5").exists()]
    return int(whole[-1].name.partition("-")[2]) if whole else -1
