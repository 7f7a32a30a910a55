"""Write a job script: ``python -m mpips sbatch JOB.toml [options] --nodes 4 > my.sbatch``.

What it does not know, every option of mpips.train, goes into the job. Memory and time are filled in
from the job (see `mpips.planning.needs`), unless they are given. With ``--sweep TABLE`` the script
is an array: a run for each row of the table, which has one more line of options a row; with
``--out`` of such a sweep, those rows that are not done. ``| sbatch`` submits what is printed.
Starts no MPI.
"""

import argparse
import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from mpips.config import OPTIONS, Config
from mpips.config.arguments import Parser, verbatim
from mpips.config.command_line import parse_command_line
from mpips.config.jobfile import copy_shared, read_toml, resolve, shared_folder
from mpips.datasets.files import is_pattern, matching
from mpips.errors import UserError, answer
from mpips.launch.batch import Request, script
from mpips.launch.sweep import read_row, read_table, rows_to_run
from mpips.planning.needs import Needs, measure, needs

MEMORY = re.compile(r"[1-9]\d*[KMGT]?")
WORD = re.compile(r"[\w.,:;+=@%/*&|!()\[\]-]+")
PASSED = {
    "partition": "partition of the cluster",
    "account": "account to be charged",
    "constraint": "feature that the nodes must have",
    "qos": "quality of service",
    "gres": "what else the nodes must have, such as gpu:1",
    "mail-type": "when to write a mail, such as END,FAIL",
    "mail-user": "whom to write it to",
}


def make_parser() -> Parser:
    """Build the parser of this command."""
    parser = verbatim("python -m mpips sbatch", __doc__)
    add = parser.add_argument
    add("--nodes", type=_count, default=1, metavar="N", help="nodes [default: 1]")
    add("--ntasks-per-node", type=_count, default=4, metavar="N", help="ranks a node [default: 4]")
    add("--cpus-per-task", type=_count, default=1, metavar="N", help="cores a rank [default: 1]")
    add("--mem-per-cpu", default="", metavar="SIZE", help="memory [default: what the job needs]")
    add("--time", default="", metavar="TIME", help="time limit [default: what the job needs]")
    add("--max-time", type=_count, default=24, metavar="HOURS", help="its maximum [default: 24]")
    add("--job-name", default="", metavar="NAME", help="[default: that of the job file]")
    for name, what in PASSED.items():
        add(f"--{name}", metavar=name.rpartition("-")[2].upper(), help=what)
    add("--scratch", metavar="DIR", help="copy the environment and the data to DIR, on a disk of "
        "each node's own, of one name in all jobs of a run")  # fmt: skip
    add("--sweep", metavar="TABLE", help="file with the options of a run on each line")
    add("--array", metavar="ROWS", help="of the table, such as 1-6%%2 for two at once, or %%2 "
        "[default: all; with --out, those that are not done]")  # fmt: skip
    add("--row", type=_count, metavar="K", help="show row K of the table, and end")
    add("--copy", type=Path, metavar="DIR", help="copy mpips' own job scripts to DIR, and end")
    return parser


def _count(text: str) -> int:
    """Return a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected an integer >= 1")
    return int(text)


def write(argv: Sequence[str]) -> str:
    """Return the script for a command line.

    Raises:
        UserError: If the command line, the job or its data is wrong, or the world too small.
    """
    args, words = make_parser().parse_known_args(argv)
    if args.copy:
        if words:
            raise UserError(f"--copy beside {words[0]}", "--copy DIR alone")
        return "".join(f"{path}\n" for path in copy_shared("slurm", args.copy))
    for name in ("row", "array"):
        if getattr(args, name) and not args.sweep:
            raise UserError(f"--{name} {getattr(args, name)}", "--sweep TABLE with it")
    if args.row:
        return shlex.join(read_row(args.sweep, args.row)) + "\n"
    line = parse_command_line(words)
    rows = read_table(args.sweep) if args.sweep else [[]]
    configs = [_resolve([*words, *row], k if args.sweep else 0) for k, row in enumerate(rows, 1)]
    array = ""
    if args.sweep:
        array = rows_to_run(args.array or "", len(rows), line.options.get("out"))
    scratch, moved = _scratch(args.scratch, configs[0])
    need = _most(configs, args.nodes, args.ntasks_per_node)
    request = Request(
        args.nodes, args.ntasks_per_node, args.cpus_per_task, _memory_size(args.mem_per_cpu),
        args.time, 3600 * args.max_time, _name(args.job_name or (line.job or Path("mpips")).stem),
        tuple(_passed(args)), scratch, args.sweep or "", array,
    )  # fmt: skip
    return script(request, need, [*words, *moved], _scripts())


def _resolve(words: list[str], row: int) -> Config:
    """Return the job of a command line; an error names the table's row, if there is one."""
    try:
        line = parse_command_line(words)
        return resolve(line.options, read_toml(line.job) if line.job else None)
    except UserError as error:
        if row:
            error.args = (f"row {row} of the table: {error}",)
        raise


def _scratch(folder: str | None, config: Config) -> tuple[tuple[str, ...], list[str]]:
    """Return what is copied, behind where to, and the options that name the data there."""
    if not folder:
        return (), []
    if not os.path.isabs(folder):
        raise UserError(f"--scratch {folder}", "an absolute path, such as /scratch/$USER")
    copied = [sys.prefix] if sys.prefix != sys.base_prefix else []
    moved: list[str] = []
    for option in ("dataset", "test_dataset"):
        names, colons, arrays = str(getattr(config, option)).partition("::")
        named = [name for name in names.split(",") if is_pattern(name) or Path(name).exists()]
        if names and named:
            copied += [os.path.abspath(path) for name in named for path in matching(name)]
            there = ",".join(f"{folder.rstrip('/')}{os.path.abspath(name)}" for name in named)
            moved += [OPTIONS[option].flag, there + colons + arrays]
    return (folder.rstrip("/"), *copied), moved


def _most(configs: Sequence[Config], nodes: int, ranks_per_node: int) -> Needs:
    """Return the most that any of the jobs takes; those that differ in little are one."""
    same = {repr(dataclasses.replace(c, seed=0, lr=None)): c for c in configs}
    found = [needs(c, measure(c), nodes, ranks_per_node) for c in same.values()]
    return Needs(*(max(values) for values in zip(*map(dataclasses.astuple, found), strict=True)))


def _memory_size(text: str) -> str:
    if text and not MEMORY.fullmatch(text):
        raise UserError(f"--mem-per-cpu {text!r}", "a size such as 500M or 4G")
    return text


def _name(text: str) -> str:
    """Return a job's name that is fit for a log and a folder."""
    return re.sub(r"[^\w.+=-]+", "-", text).strip("-") or "mpips"


def _passed(args: argparse.Namespace) -> list[str]:
    """Return the options that SLURM gets as they are."""
    given = {name: getattr(args, name.replace("-", "_")) for name in PASSED}
    for name, value in given.items():
        if value is not None and not WORD.fullmatch(value):
            raise UserError(f"--{name} {value!r}", "a word as sbatch takes it, without spaces")
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


def _scripts() -> Path:
    """Return the folder of common.sh: a copy in ``slurm`` here, or that of mpips."""
    here = Path("slurm").resolve()
    return here if (here / "common.sh").is_file() else shared_folder("slurm")


def main(argv: Sequence[str]) -> int:
    """Print the script; returns the exit code."""
    return answer(write, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
