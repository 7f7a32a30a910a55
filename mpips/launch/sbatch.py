"""Job script for SLURM: ``python -m mpips sbatch JOB.toml [options] --nodes 4 > my.sbatch``.

All other options are options of mpips.train, and go into the job. Memory and time are computed from
the job (`mpips.planning.needs`), unless you give them. Give a program of your own after ``--``:
``python -m mpips sbatch --nodes 4 --time 12:00:00 -- python train.py``. ``--sweep TABLE`` writes an
array job, which makes a run for each row of the table. A row contains further options of
mpips.train. With ``--out`` of an earlier sweep, the array contains only its unfinished rows. Pipe
the script to ``sbatch`` to submit it. ``--scheduler`` writes it for PBS Pro, LSF or Flux. Starts no
MPI.
"""

import argparse
import dataclasses
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpips.checkpoint.run_folder import DONE
from mpips.config import OPTIONS, Config
from mpips.config.command_line import load, parse_command_line
from mpips.config.jobfile import Parser, copy_shared, shared_folder, split_words, verbatim
from mpips.datasets.files import is_pattern, matching
from mpips.errors import UserError, answer, counted
from mpips.launch.hosts import lines_of
from mpips.launch.order import is_program

if TYPE_CHECKING:
    from mpips.planning.needs import Needs

SLURM = "slurm"
SCHEDULERS = (SLURM, "pbs", "lsf", "flux")
TEMPLATES = Path(__file__).parent / "templates"
CHAIN = TEMPLATES / "chain.sh"  # end of all scripts but SLURM's
TOKEN = re.compile(r"@([a-z_]+)@")  # option of this command, or a computed value
UNITS = "KMGT"
MEMORY = re.compile(rf"[1-9]\d*[{UNITS}]?")
WORD = re.compile(r"[\w.,:;+=@%/*&|!()\[\]-]+")
ARRAY = re.compile(r"(?P<rows>\d+(-\d+)?(,\d+(-\d+)?)*)?(?P<at_once>%[1-9]\d*)?")
# Formats of sbatch: minutes, minutes:seconds, hours:minutes:seconds,
# days-hours[:minutes[:seconds]].
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")
MEMORY_SLACK, MEMORY_STEP_MB = 1.25, 50
SHORTEST_S, TIME_STEP_S = 600, 300
NOTICE_S = 120  # SLURM may signal a minute early; another minute is reserve
PROGRAM_SAVE_S, PROGRAM_MEMORY = 30, "2G"  # defaults for a program, whose needs are unknown
EARLY_S = 60
PASSED = {
    "partition": "partition of the cluster",
    "account": "account to be charged",
    "constraint": "feature that the nodes must have",
    "qos": "quality of service",
    "gres": "further resources of a node, such as gpu:1",
    "mail-type": "events to send a mail at, such as END,FAIL",
    "mail-user": "recipient of the mails",
}


def make_parser() -> Parser:
    """Build the parser of this command."""
    parser = verbatim("python -m mpips sbatch", __doc__)
    add = parser.add_argument
    add("--scheduler", choices=SCHEDULERS, default=SLURM,
        help="slurm, pbs, lsf or flux [default: slurm]", metavar="NAME")  # fmt: skip
    add("--nodes", type=_count, default=1, metavar="N", help="number of nodes [default: 1]")
    add("--ntasks-per-node", type=_count, default=4, metavar="N", help="ranks a node [default: 4]")
    add("--cpus-per-task", type=_count, default=1, metavar="N", help="cores a rank [default: 1]")
    add("--mem-per-cpu", default="", metavar="SIZE", help="memory per core [default: estimated]")
    add("--time", default="", metavar="TIME", help="time limit [default: estimated]")
    add("--max-time", type=_count, default=24, metavar="HOURS", help="most time [default: 24]")
    add("--job-name", default="", metavar="NAME", help="[default: that of the job file]")
    for name, what in PASSED.items():
        add(f"--{name}", metavar=name.rpartition("-")[2].upper(), help=what)
    add("--scratch", metavar="DIR", help="copy environment and data to DIR on a local disk of each "
        "node; the same DIR in all jobs of a run")  # fmt: skip
    add("--sweep", metavar="TABLE", help="file with the options of a run on each line")
    add("--array", metavar="ROWS", help="rows of --sweep, such as 1-6%%2 for two at once, or %%2 "
        "[default: all; with --out, the unfinished ones]")  # fmt: skip
    add("--row", type=_count, metavar="K", help="show row K of the table and exit")
    add("--copy", type=Path, metavar="DIR", help="copy the job scripts of mpips to DIR and exit")
    return parser


def _count(text: str) -> int:
    """Return a positive integer from a word of the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected an integer >= 1")
    return int(text)


def write(argv: Sequence[str]) -> str:
    """Return the script for a command line.

    Raises:
        UserError: If the command line, the job or its data is wrong, or there are too few ranks.
    """
    ours, program = split_words(argv)
    args, words = make_parser().parse_known_args(ours)
    if program is not None:
        return _of_program(args, words, program)
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
    args.job_name = _fit(args.job_name or (line.job or Path("mpips")).stem)
    rows = read_table(args.sweep) if args.sweep else [[]]
    configs = [_resolve([*words, *row], k if args.sweep else 0) for k, row in enumerate(rows, 1)]
    if args.sweep:
        args.array = rows_to_run(args.array or "", len(rows), line.options.get("out"))
    args.scratch, moved = _scratch(args.scratch, configs[0])
    need = _most(configs, args.nodes, args.ntasks_per_node)
    return script(args, need, [*words, *moved], _scripts(), line.options.get("out", ""))


def _of_program(args: argparse.Namespace, options: Sequence[str], words: Sequence[str]) -> str:
    """Return the script for a user's program.

    Raises:
        UserError: If the words are no program, or options do not suit one.
    """
    from mpips.planning.needs import Needs

    if words and re.fullmatch(r"python[\d.]*", Path(words[0]).name):
        words = words[1:]
    if not is_program(words):
        raise UserError(f"-- {shlex.join(words)}", "program.py or -m MODULE behind --")
    names = "sweep", "scratch", "row", "copy"
    beside = [*options, *(f"--{name}" for name in names if getattr(args, name))]
    if beside:
        raise UserError(f"{beside[0]} with a program", "options of sbatch", "see --help")
    name = words[1] if words[0] == "-m" else Path(words[0]).stem
    args.job_name = _fit(args.job_name or name)
    args.time = args.time or f"{args.max_time}:00:00"
    args.mem_per_cpu = args.mem_per_cpu or PROGRAM_MEMORY
    need = Needs(0, args.nodes * args.ntasks_per_node, 0, 0, PROGRAM_SAVE_S, 0)
    return script(args, need, words, _scripts())


def _fit(name: str) -> str:
    """Return a name with all characters replaced that a job name or a folder cannot contain."""
    return re.sub(r"[^\w.+=-]+", "-", name).strip("-") or "mpips"


def _scripts() -> Path:
    """Return the folder of common.sh: ``slurm`` in the current folder, or the scripts of mpips."""
    here = Path("slurm").resolve()
    return here if (here / "common.sh").is_file() else shared_folder("slurm")


def _resolve(words: list[str], row: int) -> Config:
    """Return the options of a command line; an error names the row of the table, if any."""
    try:
        return load(words)
    except UserError as error:
        if row:
            error.args = (f"row {row} of the table: {error}",)
        raise


def _scratch(folder: str | None, config: Config) -> tuple[list[str], list[str]]:
    """Return the folder and the paths to copy there, and the options that name the copied data."""
    if not folder:
        return [], []
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
    return [folder.rstrip("/"), *copied], moved


def _most(configs: Sequence[Config], nodes: int, ranks_per_node: int) -> "Needs":
    """Return the largest needs of any of the jobs.

    Jobs that differ only in seed and rate count once.
    """
    from mpips.planning.needs import Needs, measure, needs

    same = {repr(dataclasses.replace(c, seed=0, lr=None)): c for c in configs}
    found = [needs(c, measure(c), nodes, ranks_per_node) for c in same.values()]
    return Needs(*(max(values) for values in zip(*map(dataclasses.astuple, found), strict=True)))


def script(
    args: argparse.Namespace, need: "Needs", words: Sequence[str], scripts: Path, out: str = ""
) -> str:
    """Return the text of the job script.

    Args:
        args: Options of this command; ``scratch`` is a list of the folder and the paths to copy
            there.
        need: Resources that the job needs.
        words: Command line of the job, or a program's.
        scripts: Folder of common.sh.
        out: Folder of the run; empty for the default.

    Raises:
        UserError: If the time limit is not longer than the notice, or the scheduler lacks an
            option.
    """
    notice_s = NOTICE_S + math.ceil(2 * need.save_s)
    limit_s = _limit_s(args, need, notice_s + EARLY_S)
    cores, memory = args.ntasks_per_node * args.cpus_per_task, _memory(args, need)
    verb = ["sweep", args.sweep] if args.sweep else ["train"]
    onward = "" if is_program(words) else ' --out "$run" --resume auto'
    values = {
        "mem_per_cpu": memory, "time": args.time or clock(limit_s),
        "memory": f"{int(memory.rstrip(UNITS)) * cores}{memory.lstrip('0123456789') or 'M'}B",
        "minutes": -(-limit_s // 60), "seconds": limit_s,
        "notice": notice_s, "least": notice_s + EARLY_S,
        "cores": cores, "slots": cores * args.nodes, "world": args.ntasks_per_node * args.nodes,
        "id": "%A_%a" if args.sweep else "%j", "comments": "\n# ".join(_comments(args, need)),
        "common": shlex.quote(str(scripts / "common.sh")), "bin": shlex.quote(f"{sys.prefix}/bin"),
        "scratch": shlex.join(["scratch", *args.scratch]) if args.scratch else "",
        "run": shlex.quote(out) if out else f'"${{MPIPS_RUN:-runs/{args.job_name}-$job}}"',
        "words": shlex.join(words) + onward, "verb": shlex.join([*verb, *words]),
    }  # fmt: skip
    return _filled(args, values)


def _filled(args: argparse.Namespace, values: Mapping[str, object]) -> str:
    """Return the scheduler's template with its values, without lines that lack a value."""
    lines = (TEMPLATES / f"{args.scheduler}.sh").read_text().splitlines()
    used = {name for line in lines for name in TOKEN.findall(line)}
    given = {name: getattr(args, name.replace("-", "_")) for name in (*PASSED, "sweep", "scratch")}
    for name, value in given.items():
        if value and name in PASSED and not WORD.fullmatch(value):
            raise UserError(f"--{name} {value!r}", "a word as sbatch takes it, without spaces")
        if value and args.scheduler != SLURM and name not in used:
            remedy = "add what your site has for it to the script"
            raise UserError(f"--{name} with --scheduler {args.scheduler}", "SLURM", remedy)
    if args.scheduler != SLURM:
        lines += CHAIN.read_text().splitlines()
    known = {**vars(args), **values}
    kept = [line for line in lines if all(known[name] for name in TOKEN.findall(line))]
    return "".join(f"{TOKEN.sub(lambda found: str(known[found[1]]), line)}\n" for line in kept)


def _comments(args: argparse.Namespace, need: "Needs") -> list[str]:
    """Return the script's comments, which explain its memory and time."""
    if not need.seconds:
        text = "Nobody has measured what the program takes: see --mem-per-cpu and --time."
        return [f"{counted(need.workers, 'rank')}. {text}"]
    owners = f"{counted(need.servers, 'server')} and " if need.servers else ""
    one = f"about {need.worker_bytes / 1e6:.0f} MB a worker"
    if need.servers:
        one += f", {need.server_bytes / 1e6:.0f} MB a server"
    workers = counted(need.workers, "worker")
    if need.evaluators:
        workers += f", beside them {counted(need.evaluators, 'evaluator')}"
    lines = [f"{owners}{workers}: {one}, and {clock(need.seconds)} to the end."]
    if not args.time and need.seconds > 3600 * args.max_time:
        lines += ["That is more than the time limit: it is requeued, and goes on, until it ends."]
    return lines


def _memory(args: argparse.Namespace, need: "Needs") -> str:
    if args.mem_per_cpu:
        if not MEMORY.fullmatch(args.mem_per_cpu):
            raise UserError(f"--mem-per-cpu {args.mem_per_cpu!r}", "a size such as 500M or 4G")
        return str(args.mem_per_cpu)
    largest = max(need.server_bytes, need.worker_bytes)
    each = MEMORY_SLACK * largest / args.cpus_per_task / 2**20
    return f"{math.ceil(each / MEMORY_STEP_MB) * MEMORY_STEP_MB}M"


def _limit_s(args: argparse.Namespace, need: "Needs", least_s: int) -> int:
    """Return the time limit in seconds.

    Raises:
        UserError: If it is not longer than `least_s`.
    """
    steps = math.ceil(need.seconds / TIME_STEP_S) * TIME_STEP_S
    limit_s = min(3600 * args.max_time, max(SHORTEST_S, 2 * least_s, steps))
    got = f"--max-time {args.max_time:g}"
    if args.time:
        limit_s, got = seconds(args.time), f"--time {args.time}"
    if limit_s <= least_s:
        expected = f"more than {clock(least_s)}"
        raise UserError(got, expected, "the ranks are asked to save that much before the end")
    return int(limit_s)


def seconds(text: str) -> int:
    """Return a time limit in seconds.

    Args:
        text: Time limit in a format of sbatch.

    Raises:
        UserError: If the text has another format.
    """
    match = TIME.fullmatch(text)
    if match is None:
        form = "minutes, hours:minutes:seconds or days-hours:minutes:seconds"
        raise UserError(f"--time {text!r}", form, "such as 90, 12:00:00 or 1-12:00:00")
    parts = [int(part) for part in match["rest"].split(":")]
    if match["days"] is None and len(parts) < 3:
        parts.insert(0, 0)
    hours, minutes, rest = (*parts, 0, 0)[:3]
    return ((24 * int(match["days"] or 0) + hours) * 60 + minutes) * 60 + rest


def clock(seconds: float) -> str:
    """Return a time as SLURM writes it: ``[days-]HH:MM:SS``."""
    minutes, second = divmod(math.ceil(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{f'{days}-' if days else ''}{hour:02d}:{minute:02d}:{second:02d}"


def read_table(path: str) -> list[list[str]]:
    """Return the rows of a sweep's table, as words; a word in quotes may contain spaces.

    Raises:
        UserError: If it cannot be read, has an open quote, or has no row.
    """
    rows = []
    for number, line in enumerate(lines_of("--sweep", path), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            rows.append(shlex.split(line))
        except ValueError as problem:
            got = f"{path}, line {number}: {str(problem).lower()}"
            raise UserError(got, "options of mpips.train") from None
    if not rows:
        raise UserError(f"--sweep {path} without a row", "options of mpips.train on each line")
    return rows


def read_row(table: str, number: int) -> list[str]:
    """Return a row of a table, counted from 1."""
    rows = read_table(table)
    if not 1 <= number <= len(rows):
        raise UserError(f"row {number} of {table}, which has {len(rows)}", f"1 to {len(rows)}")
    return rows[number - 1]


def rows_to_run(array: str, rows: int, out: str | None) -> str:
    """Return the rows to run in SLURM's notation: the given rows, or all unfinished rows.

    Args:
        array: Option ``--array``, such as ``1-6%2``; empty for all.
        rows: Number of rows of the table.
        out: Folder of the sweep's runs, or None.

    Raises:
        UserError: If the table lacks such rows, or all rows are done.
    """
    match = ARRAY.fullmatch(array)
    if match is None:
        raise UserError(f"--array {array}", "rows such as 1-6, 2,5 or 1-6%2")
    asked = [int(number) for number in re.findall(r"\d+", match["rows"] or "")]
    if asked and not 1 <= min(asked) <= max(asked) <= rows:
        raise UserError(f"--array {array} of a table of {rows} rows", f"1 to {rows}")
    left = [k for k in range(1, rows + 1) if not (out and (Path(out) / f"{k}" / DONE).exists())]
    if not left:
        raise UserError(f"--out {out}, where all {rows} rows are done", "one that is not")
    every = f"1-{rows}" if len(left) == rows else ",".join(map(str, left))
    return (match["rows"] or every) + (match["at_once"] or "")


def main(argv: Sequence[str]) -> int:
    """Print the script, and return the exit code."""
    return answer(write, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
