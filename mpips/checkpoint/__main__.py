"""Checkpoint tool: ``python -m mpips.checkpoint {list,inspect,verify,export} DIR``."""

import argparse
import contextlib
import signal
import sys
from pathlib import Path

from mpips.checkpoint import exchange, list_checkpoints, newest_whole, open_checkpoint, verify
from mpips.checkpoint.complete import check_ledger
from mpips.checkpoint.files import folder_step
from mpips.config.jobfile import Parser
from mpips.errors import Exit, UserError, as_user_error, human_bytes


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = Parser(prog="python -m mpips.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for function, text in (
        (list_all, "one line for each checkpoint: step, size, and its damage if any"),
        (inspect, "layout, shards, slots and state of one checkpoint"),
        (verify_all, "check every byte; exit code 0 if all are whole, else 1"),
        (export, "write the parameters of one checkpoint to a file that other programs read"),
    ):
        name = function.__name__.removesuffix("_all")
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(function=function)
        command.add_argument(
            "dir", metavar="DIR", help="run directory, its checkpoints folder, or one checkpoint"
        )
        command.add_argument("--step", type=int, metavar="N", help="step of the checkpoint")
        if function is verify_all:
            command.add_argument(
                "--run", action="store_true",
                help="also check that the run in DIR is complete: its end, its data, its pushes",
            )  # fmt: skip
        if function is export:
            command.add_argument("--table", default="", metavar="NAME", help="of a table of rows")
            command.add_argument(
                "--ema", action="store_true", help="the average of --ema in place of the parameters"
            )
            command.add_argument(
                "-o", "--output", required=True, metavar="FILE",
                help="file to write: .npz (with the slots), .safetensors, or .pt for torch.load; "
                "with --table .npz, .parquet or .safetensors",
            )  # fmt: skip
    return parser


def find(args: argparse.Namespace) -> list[Path]:
    """Return the checkpoint folders that DIR and --step name, oldest first.

    Raises:
        UserError: If there is none.
    """
    folders = list_checkpoints(args.dir)
    if not folders:
        remedy = "give a run directory, its checkpoints folder, or one checkpoint"
        raise UserError(f"no checkpoint at {args.dir}", "at least one", remedy)
    chosen = [p for p in folders if args.step is None or _step(p) == args.step]
    if not chosen:
        steps = ", ".join(str(_step(p)) for p in folders)
        raise UserError(f"no checkpoint of step {args.step} at {args.dir}", f"one of {steps}")
    return chosen


def _step(folder: Path) -> int:
    """Return the step in a folder's name, or in its index if the name has another form."""
    step = folder_step(folder.resolve())
    return open_checkpoint(folder).step if step is None else step


def list_all(args: argparse.Namespace) -> int:
    """Print one line for each checkpoint, and mark the newest complete one."""
    checked = [(folder, verify(folder)) for folder in find(args)]
    newest = next((folder for folder, problems in reversed(checked) if not problems), None)
    for folder, problems in checked:
        verdict = "; ".join(problems) or ("whole, newest" if folder == newest else "whole")
        step = folder_step(folder.resolve())
        name = folder.name if step is None else f"step {step}"
        print(f"{name:<16} {human_bytes(_size(folder)):>10}  {verdict}")
    return Exit.DONE


def _size(folder: Path) -> int:
    """Return the size of a folder's files; 0 if a running job has removed it meanwhile."""
    with contextlib.suppress(OSError):
        return sum(p.stat().st_size for p in folder.iterdir() if p.is_file())
    return 0


def inspect(args: argparse.Namespace) -> int:
    """Print the contents of one checkpoint, without the values of its arrays."""
    checkpoint = open_checkpoint(find(args)[-1])
    size = human_bytes(_size(checkpoint.path))
    parameters = f"{checkpoint.layout.size} parameters, {checkpoint.dtype}"
    print(f"{checkpoint.path}: step {checkpoint.step}, {parameters}, {size}")
    print("arrays:")
    for name, shape in zip(checkpoint.layout.names, checkpoint.layout.shapes, strict=True):
        print(f"  params/{name} {shape}")
    print(f"slots: {', '.join(checkpoint.slot_names) or 'none'}")
    print("shards:")
    for s in checkpoint.shards:
        print(f"  {s.file} owner {s.owner} [{s.begin}, {s.end}) {human_bytes(s.bytes)} {s.sha256}")
    if checkpoint.workers:
        print(f"workers' own: {', '.join(checkpoint.worker_names)}")
    for w in checkpoint.workers:
        print(f"  {w.file} worker {w.owner} {human_bytes(w.bytes)} {w.sha256}")
    if checkpoint.tables:
        print("tables:")
    for name, table in checkpoint.tables.items():
        changed = checkpoint.count_rows(name)
        print(f"  tables/{name}: {table['rows']} rows of {table['dim']}, {changed} changed")
    for r in checkpoint.rows:
        since = "" if r.base is None else f", since step {r.base}"
        print(f"  {r.file} rows of owner {r.owner}{since} {human_bytes(r.bytes)} {r.sha256}")
    print("state:")
    state = checkpoint.state if isinstance(checkpoint.state, dict) else {"": checkpoint.state}
    for key, value in state.items():
        print(f"  {key}: {shortened(value)}")
    for name, array in checkpoint.arrays.items():
        print(f"  arrays/{name} {array.shape} {array.dtype}: {shortened(array.tolist())}")
    return Exit.DONE


def verify_all(args: argparse.Namespace) -> int:
    """Print one line for each problem of the checkpoints, or that all are whole."""
    if args.run and args.step is not None:
        raise UserError("--step with --run", "one of them", "--run checks all checkpoints")
    folders = find(args)
    problems = [problem for folder in folders for problem in verify(folder)]
    if args.run and not problems:
        problems = [f"{args.dir}: {text}" for text in check_ledger(Path(args.dir))]
    for problem in problems:
        print(problem)
    if not problems:
        count = f"{len(folders)} checkpoint{'s' * (len(folders) > 1)}"
        print(f"{args.dir}: {count}, whole{'; the run is complete' * args.run}")
    return Exit.FAILED if problems else Exit.DONE


def export(args: argparse.Namespace) -> int:
    """Write the newest complete checkpoint, or the one of --step, to a file."""
    output = Path(args.output)
    if output.exists():
        raise UserError(f"{output} exists", "a new file", "remove it, or give another name")
    if not output.parent.is_dir():
        raise UserError(f"{output.parent} is no folder", "one for the file", "create it first")
    checkpoint, complaints = newest_whole(args.dir if args.step is None else find(args)[-1])
    for complaint in complaints:
        print(f"not whole: {complaint}", file=sys.stderr)
    if checkpoint is None:
        raise UserError(f"no whole checkpoint at {args.dir}", "one", "run verify to see why")
    exchange.export(checkpoint, output, args.table, args.ema)
    print(f"{output}: step {checkpoint.step}, {human_bytes(output.stat().st_size)}")
    return Exit.DONE


def shortened(value: object, length: int = 100) -> str:
    """Return a value's text, shortened to `length` characters."""
    text = str(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code, 2 after a user's error, which it prints."""
    try:
        args = make_parser().parse_args(argv)
        return args.function(args)
    except (UserError, PermissionError) as problem:
        error = as_user_error(problem)
        print(f"mpips.checkpoint: {error}", file=sys.stderr)
        return error.code


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends it in silence, such as by `| head`
    sys.exit(main())
