"""Runs a job's script in modes, in one world: `` scripts.py OUT MODES SCRIPT [OPTION ...]``."""

import runpy
import sys
from pathlib import Path


def main(out: Path, modes: list[str], script: str, options: list[str]) -> None:
    sys.path.insert(0, str(Path(script).parent))  # as Python does that runs it
    job = runpy.run_path(script)
    for mode in modes:
        code = job["main"](["--mode", mode, "--out", str(out / mode), *options])
        assert code == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3], sys.argv[4:])
