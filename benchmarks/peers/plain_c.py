"""Push and pull, and rounds, in plain C, which show the cost of the protocol alone."""

import argparse
import subprocess
import tempfile
from pathlib import Path

from script import (  # type: ignore[import-not-found]
    add_size,
    make_parser,
    parse,
    report,
)

SOURCE = Path(__file__).with_suffix(".c")
COMPILER = "cc"


def measure(given: argparse.Namespace, folder: Path) -> list[float]:
    """Compile and run the program; return the seconds of each repeat."""
    program = folder / SOURCE.stem
    flags = ["-O3", "-march=native", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([COMPILER, *flags, str(SOURCE), "-o", str(program)], check=True)
    numbers = (4 * given.size, given.workers, given.steps, given.repeats)
    command = [str(program), given.measure, *map(str, numbers)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [float(line) for line in done.stdout.split()]


def main() -> None:
    """Run the program, and print the measurement."""
    parser = make_parser(__doc__, ["push+pull", "round"])
    add_size(parser)
    given = parse(parser)
    version = subprocess.run([COMPILER, "-dumpversion"], check=True, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as folder:
        seconds = measure(given, Path(folder))
    report("plain-c", version.stdout.strip(), given, 4 * given.size, seconds)


if __name__ == "__main__":
    main()
