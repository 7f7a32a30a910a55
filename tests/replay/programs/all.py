"""Records runs of the other programs here, in one world: ``all.py OUT NAME ...``."""

import importlib
import sys


def main(out: str, names: list[str]) -> int:
    """Run them, those of `linear` twice; returns the exit code."""
    codes = []
    for name in names:
        words = ("float32", "int8") if name == "linear" else ()
        for _ in range(2 if words else 1):
            codes.append(importlib.import_module(name).main(f"{out}/{name}", 2, *words))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
