"""Records runs of the other programs here, in one world: ``all.py RUNS``, as JSON."""

import importlib
import json
import sys


def main(runs: list[tuple[str, str, list[str]]]) -> int:
    """Run each program, given as its name, the folder of its run, and words; returns the code."""
    return max(importlib.import_module(name).main(out, 2, *words) for name, out, words in runs)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
