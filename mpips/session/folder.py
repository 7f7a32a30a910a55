"""Folder of a run: location, run to continue, leftovers of earlier starts.

This module uses no MPI: rank 0 examines the files, and sends the result to the other ranks.

Messages:
    --out X holds a run: Go on with it by ``--resume``, remove it, or choose another ``--out``.
    differs from the checkpoint of step N: ``config.toml`` was changed by hand, or by a start that
        saved nothing. It holds from here on.
"""

import contextlib
import dataclasses
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from mpips.checkpoint import Checkpoint, list_checkpoints, need_whole
from mpips.checkpoint.files import (
    OtherFormatError,
    committed,
    folder_step,
    is_parameter_file,
    remove_checkpoint,
)
from mpips.checkpoint.index import read_index
from mpips.checkpoint.run_folder import (
    CHECKPOINTS,
    CONFIG,
    LOCK,
    METRICS,
    RECORD,
    SUMMARY,
    TENSORBOARD,
    TRACE,
    claim,
    is_early,
    write_whole,
    writing_to,
)
from mpips.config import OPTIONS, Config
from mpips.config.command_line import CommandLine
from mpips.config.jobfile import from_toml, read_toml, resolve, to_toml
from mpips.config.option import shown
from mpips.config.validation import check_resume, check_saved, differences
from mpips.errors import UserError
from mpips.optim import rated

TRIAL = f"{LOCK}.tmp"  # written to test a folder
PART = re.compile(r"part-\d{4,}")  # a folder in RECORD, and a file in such a folder
RECORDED = re.compile(r"server-\d{5,}")
EVENTS = re.compile(r"events\.out\.tfevents\.")
LATER = ("train", "eval", "log")  # kinds of lines in METRICS that only a job that trains writes
RUNS = "runs"
MODES = "|".join(OPTIONS["mode"].legal)
DEFAULT_NAME = re.compile(
    rf"(?P<problem>.+)-(?P<mode>{MODES})-(?P<time>\d{{8}}-\d{{6}})(-(?P<number>\d+))?"
)


@dataclass
class Run:
    """Folder of a run, and the run that it continues.

    Attributes:
        config: The resolved configuration.
        out: Folder of the run.
        checkpoint: Path of the checkpoint or file of parameters to start from, or None.
        resumed: Whether the run continues the checkpoint's run.
        notes: Messages about the folder for the user.
    """

    config: Config
    out: Path
    checkpoint: Path | None
    resumed: bool
    notes: list[str]


def find_config(line: CommandLine) -> tuple[Config, Path, bool]:
    """Resolve a command line with its job file and, on resume, with the saved run's options.

    Returns:
        The configuration, the run's folder, and whether it contains a run to continue.

    Raises:
        UserError: If a file or a value is wrong, or the saved run does not match.
    """
    given = line.job_values()
    wanted = {**given, **line.options}
    out = _run_folder(wanted)
    saved = _saved_values(out) if wanted.get("resume") else None
    if saved is None:
        return rated(resolve(line.options, given)), out, False
    config = rated(resolve(line.options, given, saved))
    try:
        check_resume(resolve({}, saved=saved), config, out)
    except UserError:
        if wanted["resume"] == "auto" and not _has_begun(out):  # it ended in its first batch
            return rated(resolve(line.options, given)), out, False
        raise
    return config, out, True


def _saved_values(out: Path) -> dict[str, Any] | None:
    """Return the saved configuration of the run in a folder, or None if there is no run.

    It is read from ``config.toml``. Every checkpoint contains a copy with a checksum. The copy is
    used if the file is missing. The file must agree with the copy in all options that the arrays or
    the order of samples depend on.

    Raises:
        UserError: If the file cannot be read, or does not agree with the copy.
    """
    exists = _is_file(out / CONFIG)
    sealed = _newest_sealed(out)
    if not exists or sealed is None:
        values = dataclasses.asdict(from_toml(sealed)) if sealed is not None else None
        return read_toml(out / CONFIG) if exists else values
    remedy = f"or remove {out / CONFIG}: the checkpoints have a copy"
    try:
        values = read_toml(out / CONFIG)
    except UserError as problem:
        got, _, expected = str(problem).partition(", expected ")
        raise UserError(got, expected, remedy) from None
    check_saved(resolve({}, saved=values), from_toml(sealed), out / CONFIG, remedy)
    return values


def _newest_sealed(out: Path) -> str | None:
    """Return the configuration from the newest valid checkpoint index of a run.

    Raises:
        UserError: If another version of mpips wrote the index.
    """
    for folder in reversed(list_checkpoints(out)):
        try:
            return read_index(folder).config
        except OtherFormatError:
            raise
        except UserError:
            continue
    return None


def find_run(line: CommandLine) -> Run:
    """Find the requested run, new or to continue, and create the folder of a new one.

    Raises:
        UserError: If there is nothing to continue, a run would be overwritten, the folder cannot be
            written, or a checkpoint does not exist.
    """
    config, out, exists = find_config(line)
    if exists and not config.eval_only:
        claim(out)
    if exists and (config.resume != "auto" or _has_begun(out)):
        remedy = "bring back what is missing, or remove the folder and start again"
        found, notes = need_whole(out, remedy=remedy)
        notes += _edited(out, found, {**line.job_values(), **line.options})
        return Run(config, out, found.path, True, notes)
    if config.resume == "yes":
        raise UserError(f"--resume finds no run in {out}", "a run's folder", "use --resume auto")
    checkpoint, notes = _start_checkpoint(config)
    if config.eval_only and checkpoint is None:
        raise UserError(f"--eval-only finds no run in {out}", "a run's folder", "set --init-from")
    if config.eval_only and config.out:
        _try(out)
    if not config.eval_only:
        out = _make(out, named=bool(config.out), held=exists)
    return Run(config, out, checkpoint, False, notes)


def save_config(out: Path, config: Config) -> None:
    """Write the job file that repeats this run, atomically.

    Raises:
        UserError: If it cannot be written.
    """
    defaults = {k: OPTIONS[k].default for k in ("out", "resume", "eval_only")}
    lr = config.learning_rate  # the default may change in a later version
    with writing_to(out):
        write_whole(out / CONFIG, to_toml(dataclasses.replace(config, **defaults, lr=lr)))


def forget(out: Path) -> None:
    """Remove the files of a job that was refused or stopped before it saved anything."""
    if committed(out) or not out.is_dir():
        return
    _clear(out)
    # Otherwise LOCK marks the other files as the run's.
    if all(path.name == LOCK for path in out.iterdir()):
        (out / LOCK).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a link to a folder, or the current one
            out.rmdir()


def _run_folder(wanted: Mapping[str, Any]) -> Path:
    """Return the folder that `wanted` names; on resume without a name, the newest that matches."""
    if wanted.get("out"):
        return Path(wanted["out"])
    name = str(wanted.get("problem", OPTIONS["problem"].default)).rpartition(":")[2]
    mode = wanted.get("mode", OPTIONS["mode"].default)
    asked = {k: wanted.get(k) for k in ("problem", "mode")}
    # May begin a run, so it continues only one with the same options.
    if wanted.get("resume") == "auto":
        asked = {k: asked[k] or OPTIONS[k].default for k in asked}
    newest = _newest(asked, name)
    if wanted.get("resume") and newest is not None:
        return newest
    return Path(RUNS) / f"{name}-{mode}-{time.strftime('%Y%m%d-%H%M%S')}"


def _newest(asked: Mapping[str, Any], name: str) -> Path | None:
    """Return the newest run under ``runs/`` with the requested mode and problem, or None."""
    runs: list[tuple[str, int, Path]] = []
    for path in Path(RUNS).glob("*"):
        match = DEFAULT_NAME.fullmatch(path.name)
        if match is None or (asked["problem"] and match["problem"] != name):
            continue
        if (not asked["mode"] or match["mode"] == asked["mode"]) and _holds_run(path):
            runs.append((match["time"], int(match["number"] or 1), path))
    return max(runs)[2] if runs else None


def _holds_run(out: Path) -> bool:
    return (out / CONFIG).exists() or bool(committed(out))


def _is_file(path: Path) -> bool:
    with writing_to(path.parent):  # raises if the name is too long
        return path.is_file()


def _make(out: Path, named: bool, held: bool) -> Path:
    """Create an empty folder for a new run, test it, and lock it. Return its path.

    Args:
        out: The folder; if the user has not named it, it may get a number.
        named: Whether the user named it.
        held: Whether it is locked already: the run in it starts anew.
    """
    with writing_to(out):
        if held:
            _clear_folders(out)
        else:
            out = out if named else _fresh(out)
            if out.exists() and not _is_free(out):
                raise _taken(out)
            out.mkdir(parents=True, exist_ok=True)
            claim(out)
            _clear(out)
    _try(out)
    return out


def _try(out: Path) -> None:
    """Create a folder, if it does not exist, and write a file to it. Other jobs may start in it."""
    with writing_to(out):
        out.mkdir(parents=True, exist_ok=True)
        (out / TRIAL).write_text("")
        (out / TRIAL).unlink(missing_ok=True)


def _clear(out: Path) -> None:
    """Remove the files of starts that never trained.

    The trace stays, as it shows why they ended.

    Files of other programs stay too.
    """
    _clear_folders(out)
    for path in out.iterdir():
        is_file = path.is_symlink() or path.is_file()
        if is_file and is_early(path.name) and path.name not in (LOCK, f"{TRACE}.json"):
            path.unlink(missing_ok=True)


def _clear_folders(out: Path) -> None:
    """Remove the checkpoints, records and event files of starts that never trained."""
    folders = [path for path in _listed(out / CHECKPOINTS) if folder_step(path) is not None]
    parts = [path for path in _listed(out / RECORD) if PART.fullmatch(path.name)]
    for path in chain.from_iterable(map(_listed, parts)):
        if folder_step(path) is not None:  # a part begins with a checkpoint
            folders.append(path)
        elif RECORDED.fullmatch(path.name):
            path.unlink()
    for folder in folders:
        remove_checkpoint(folder)
    for path in _listed(out / TENSORBOARD):
        if EVENTS.match(path.name):
            path.unlink()
    for folder in (*parts, *(out / name for name in (CHECKPOINTS, RECORD, TENSORBOARD))):
        if folder.is_dir() and not folder.is_symlink() and not _listed(folder):
            folder.rmdir()


def _listed(folder: Path) -> list[Path]:
    """Return the contents of a folder; [] if it does not exist."""
    return list(folder.iterdir()) if folder.is_dir() else []


def _taken(out: Path) -> UserError:
    got, remedy = f"--out {out} is a file", "choose another --out"
    if out.is_dir():
        got = f"--out {out} is not empty, and holds no run"
    if _holds_run(out):
        got = f"--out {out} holds a run"
        remedy = f"go on with it by --resume, remove it, or {remedy}"
    return UserError(got, "a new or empty folder", remedy)


def _is_free(out: Path) -> bool:
    """Return whether a new run may use a folder: it is empty, or its earlier starts never trained.

    A start writes `LOCK` first. Without it, the files belong to another program.
    """
    if not out.is_dir():
        return False
    names = {path.name for path in out.iterdir()} - {TRIAL}
    has_results = SUMMARY in names or committed(out)
    is_run_folder = not names or LOCK in names
    return is_run_folder and all(map(is_early, names)) and not (has_results and _has_trained(out))


def _has_begun(out: Path) -> bool:
    """Return whether a run has trained and saved a checkpoint, also if that was removed since."""
    return _has_trained(out) and (bool(committed(out)) or _logged(out, "checkpoint"))


def _has_trained(out: Path) -> bool:
    """Return whether a run has gone beyond its first batch."""
    return any(folder_step(folder) for folder in list_checkpoints(out)) or _logged(out, *LATER)


def _logged(out: Path, *kinds: str) -> bool:
    """Return whether the log, since the run began anew last, has a line of one of these kinds."""
    text = (out / METRICS).read_text(errors="replace") if (out / METRICS).is_file() else ""
    lines = re.split(r'^.*"kind": "start".*"resumed": false.*$', text, flags=re.MULTILINE)[-1]
    return any(f'"kind": "{kind}"' in lines for kind in kinds)


def _fresh(out: Path) -> Path:
    """Create the folder, or one with a number appended: two jobs may start in the same second."""
    out.parent.mkdir(exist_ok=True)
    for number in range(1, 10_000):
        free = out if number == 1 else out.with_name(f"{out.name}-{number}")
        try:
            free.mkdir()
        except FileExistsError:
            continue
        return free
    raise UserError(f"{out} and 9999 like it are in use", "a new folder", "give --out")


def _edited(out: Path, checkpoint: Checkpoint, given: Collection[str]) -> list[str]:
    """Return notes on changes of ``config.toml`` since the checkpoint, without `given` options."""
    if not _is_file(out / CONFIG):
        return [f"{out / CONFIG} is missing: the copy in {checkpoint.path} is taken"]
    before, now = from_toml(checkpoint.config), resolve({}, saved=read_toml(out / CONFIG))
    changes = [
        f"{name} {shown(old)} -> {shown(new)}"
        for name, old, new in differences(before, now)
        if name not in given and new != "auto"  # the checkpoint has settled it
    ]
    if not changes:
        return []
    cause = "changed by hand, or by a start that saved nothing"
    return [
        f"{out / CONFIG} differs from the checkpoint of step {checkpoint.step} ({cause}): "
        f"{', '.join(changes)}; this holds from here on"
    ]


def _start_checkpoint(config: Config) -> tuple[Path | None, list[str]]:
    if not config.init_from:
        return None, []
    file = Path(config.init_from)
    if is_parameter_file(file):
        return file, []
    remedy = "give a run's folder, a step-... folder in its checkpoints, or a file"
    found, notes = need_whole(file, f"--init-from {file}", remedy)
    # A run moves its link to the best, and all ranks must read the same checkpoint.
    return found.path.resolve() if found.path.is_symlink() else found.path, notes
