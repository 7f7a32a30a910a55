"""What makes a configuration valid: its fields by themselves, and against each other."""

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from mpips.config import LAYOUT_FIELDS, OPTIONS, SESSION_FIELDS, Config
from mpips.config.delay import parse_delays
from mpips.config.groups import parse_groups
from mpips.config.modes import ROUND_MODES
from mpips.config.option import shown
from mpips.config.row_optimizer import parse_row_optimizer
from mpips.errors import UserError

ADAPTIVE = ("adagrad", "rmsprop", "adam", "adamw")
FILES = ("problem", "dataset", "test_dataset")  # options that name files
# Options that have an effect beside some values of another one alone: that, and its values.
BESIDE: dict[str, tuple[str, tuple[Any, ...]]] = {
    "hidden": ("problem", ("mlp", "wide_deep")),
    "activation": ("problem", ("mlp", "wide_deep")),
    "factors": ("problem", ("factorization_machine", "wide_deep")),
    "test_fraction": ("test_dataset", ("",)),
    "momentum": ("optimizer", ("momentum", "nesterov")),
    "beta1": ("optimizer", ("adam", "adamw")),
    "beta2": ("optimizer", ("adam", "adamw")),
    "eps": ("optimizer", ADAPTIVE),
    "decay": ("optimizer", ("rmsprop",)),
    "step_every": ("schedule", ("step",)),
    "step_factor": ("schedule", ("step",)),
    "epochs": ("steps", (0,)),
    "topk_ratio": ("codec", ("topk",)),
    "topk_momentum": ("codec", ("topk",)),
    "topk_warmup": ("codec", ("topk",)),
    "powersgd_rank": ("codec", ("powersgd",)),
}


def has_effect(name: str, values: Mapping[str, Any]) -> bool:
    """Whether an option has an effect in a job; at its default, or at 0, it asks for none.

    Args:
        name: A key of `BESIDE`.
        values: Of the job's options, where they are not the default.
    """
    idle = values.get(name, OPTIONS[name].default) in (OPTIONS[name].default, 0)
    return idle or _is_beside(name, values)


def _is_beside(name: str, values: Mapping[str, Any]) -> bool:
    """Whether a key of `BESIDE` stands beside what it needs."""
    other, needed = BESIDE[name]
    beside = values.get(other, OPTIONS[other].default)
    own_problem = other == "problem" and beside not in OPTIONS[other].legal
    return own_problem or beside in needed


def applies(name: str, values: Mapping[str, Any]) -> bool:
    """Whether a job's mode and its other options leave an effect to an option.

    Args:
        name: Of the option.
        values: Of the job's options, where they are not the default.
    """
    modes = OPTIONS[name].modes
    if modes and values.get("mode", OPTIONS["mode"].default) not in modes:
        return False
    return name not in BESIDE or _is_beside(name, values)


def _check_effects(config: Config) -> None:
    values = vars(config)
    for name, (other, needed) in BESIDE.items():
        if has_effect(name, values):
            continue
        got, flags = f"{name} {shown(values[name])}", (OPTIONS[name].flag, OPTIONS[other].flag)
        if not needed[0]:  # each excludes the other
            remedy = f"leave out {flags[0]} or {flags[1]}"
            got = f"{got} and {other} {shown(values[other])}"
            raise UserError(got, "one of the two", remedy)
        legal = " or ".join(map(repr, needed))
        remedy = f"leave out {flags[0]}, or use {flags[1]} {' or '.join(needed)}"
        raise UserError(f"{got} with {other} {values[other]!r}", f"{other} {legal}", remedy)


def validate(config: Config) -> None:
    """Check every field, and the fields against each other, as far as no world is needed.

    Raises:
        UserError: For the first thing that is wrong.
    """
    for name, option in OPTIONS.items():
        option.check(getattr(config, name))
    for name, option in OPTIONS.items():
        if not option.fits(getattr(config, name), config.mode):
            raise option.mode_error(getattr(config, name), config.mode)
    _check_effects(config)
    _check_servers(config)
    _check_reads(config)
    _check_staleness(config)
    _check_record(config)
    _check_backup(config)
    _check_length(config)
    _check_evaluators(config)
    _check_schedule(config)
    _check_local_steps(config)
    if config.outer_nesterov and not config.outer_momentum:
        remedy = "give --outer-momentum 0.9, as DiLoCo does"
        raise UserError("outer_nesterov without outer_momentum", "both", remedy)
    parse_delays(config.inject_delay)
    parse_groups(config.groups)
    parse_row_optimizer(config.row_optimizer)
    _check_codecs(config)
    if not config.dataset:
        raise UserError("dataset ''", "a name or the path of a file", "set --dataset")
    if config.classes == 1:
        raise UserError("classes 1", "0 (inferred) or at least 2", "set --classes")
    if config.eval_only and not (config.resume or config.init_from):
        raise UserError("eval_only without a checkpoint", "--resume or --init-from CHECKPOINT")
    if config.eval_only and config.quiet and not config.out:
        raise UserError("eval_only and quiet without out", "a place for the result", "give --out")


def _check_staleness(config: Config) -> None:
    if config.delay_adaptive and not config.delay_compensation:
        remedy = "give --delay-compensation X"
        raise UserError("delay_adaptive without delay_compensation", "both", remedy)
    for name in ("prefetch", "node_aggregation"):
        if config.delay_compensation and getattr(config, name):
            expected = "one of the two"
            remedy = "a server has to know what each gradient was computed from"
            raise UserError(f"delay_compensation and {name}", expected, remedy)


def _check_reads(config: Config) -> None:
    if config.mode == "ssp" and config.far_read == "get":
        remedy = "the owner answers when the staleness bound holds"
        raise UserError("far_read 'get' in mode ssp", "auto or reply", remedy)


def _check_record(config: Config) -> None:
    if not config.record:
        return
    if config.read != "consistent":
        remedy = "what a torn read saw cannot be made again: add --read consistent"
        raise UserError(f"record with read {config.read!r}", "read 'consistent'", remedy)
    if config.node_aggregation:
        remedy = "leave out --node-aggregation"
        raise UserError("record and node_aggregation", "one of the two", remedy)
    if config.pull_codec != "none":
        remedy = "replies are packed by draws that are not kept: leave out --pull-codec"
        raise UserError(f"record with pull_codec {config.pull_codec!r}", "'none'", remedy)


def _check_backup(config: Config) -> None:
    if not config.backup_workers:
        return
    if not (config.servers or config.server_ranks):
        remedy = "servers count who comes first: give --servers N"
        raise UserError(f"backup_workers {config.backup_workers} without servers", "both", remedy)
    if config.reduce != "auto":
        remedy = "each worker's gradient is counted by itself"
        raise UserError("backup_workers and reduce", "one of the two", remedy)


def _check_servers(config: Config) -> None:
    ranks = config.server_ranks
    if config.mode not in ROUND_MODES and config.servers == 0:
        remedy = f"only {' and '.join(ROUND_MODES)} do without servers: use --mode sync"
        raise UserError(f"servers 0 in mode {config.mode}", "servers >= 1", remedy)
    if len(set(ranks)) < len(ranks):
        raise UserError(f"server_ranks {shown(ranks)}", "distinct ranks", "name each rank once")
    if ranks and config.servers not in (None, len(ranks)):
        got = f"servers {config.servers} with {len(ranks)} server_ranks"
        raise UserError(got, f"servers {len(ranks)}", "leave out --servers")
    if ranks and config.server_hosts:
        raise UserError("server_ranks and server_hosts", "one of the two", "leave out one")
    if config.server_hosts and config.servers == 0:
        raise UserError("server_hosts with servers 0", "servers >= 1", "leave out --server-hosts")


def _check_length(config: Config) -> None:
    if not (config.epochs or config.steps or config.eval_only):
        raise UserError("epochs 0 and steps 0", "epochs >= 1 or steps >= 1", "set --epochs")
    if config.target_accuracy and config.problem == "linear":
        got = f"target_accuracy {config.target_accuracy} with problem 'linear'"
        remedy = "a regression has none: leave out --target-accuracy"
        raise UserError(got, "a problem with an accuracy", remedy)
    if config.target_accuracy and not config.eval_every:
        got = f"target_accuracy {config.target_accuracy} with eval_every 0"
        raise UserError(got, "eval_every > 0", "it is checked at evaluations: set --eval-every")


def _check_evaluators(config: Config) -> None:
    if config.evaluators and not config.eval_every:
        got = f"evaluators {config.evaluators} with eval_every 0"
        raise UserError(got, "eval_every > 0", "set --eval-every, in epochs")
    for name in ("patience", "keep_best"):
        if getattr(config, name) and not config.evaluators:
            got = f"{name} without evaluators"
            raise UserError(got, "evaluators >= 1", "they evaluate checkpoints: add --evaluators 1")


def _check_schedule(config: Config) -> None:
    if config.schedule == "step" and not config.step_every:
        raise UserError("schedule 'step' with step_every 0", "step_every >= 1", "set --step-every")
    if config.schedule == "warmup" and not config.warmup_steps:
        remedy = "set --warmup-steps"
        raise UserError("schedule 'warmup' with warmup_steps 0", "warmup_steps >= 1", remedy)
    # Elsewhere an update is one worker's step, so that only a world gives their number.
    if config.in_rounds and 0 < config.steps <= config.warmup_steps:
        got = f"warmup_steps {config.warmup_steps} with steps {config.steps}"
        raise UserError(got, f"warmup_steps < {config.steps}", "set --warmup-steps")


def _check_codecs(config: Config) -> None:
    if config.pull_codec not in ("none", "auto") and config.far_read == "get":
        got = f"pull_codec {config.pull_codec!r} with far_read 'get'"
        raise UserError(got, "far_read 'reply'", "only an owner packs: leave out --far-read")
    for name in ("codec", "pull_codec"):
        if config.reduce == "allreduce" and getattr(config, name) != "none":
            got = f"{name} {getattr(config, name)!r} with reduce 'allreduce'"
            remedy = "MPI adds up what is not packed: leave out --reduce"
            raise UserError(got, "reduce 'auto' or 'shared'", remedy)
    if config.topk_momentum and config.optimizer != "sgd":
        got = f"topk_momentum {config.topk_momentum} with optimizer {config.optimizer!r}"
        remedy = "the servers' rule would smooth once more: use --optimizer sgd"
        raise UserError(got, "optimizer 'sgd'", remedy)
    if config.codec == "powersgd":
        _check_powersgd(config)
    if config.mode == "local_sgd" and config.codec != "none" and _averages_slots(config):
        got = f"codec {config.codec!r} in mode local_sgd with local_slots 'average'"
        remedy = "only what a round changes is packed: add --local-slots keep"
        raise UserError(got, "local_slots 'keep', or optimizer 'sgd'", remedy)


def _averages_slots(config: Config) -> bool:
    return config.local_slots == "average" and config.optimizer != "sgd"


def _check_local_steps(config: Config) -> None:
    steps, parts = config.local_steps, config.fragments
    if steps % parts:
        near = f"{max(1, steps // parts) * parts} or {(steps // parts + 1) * parts}"
        remedy = f"one fragment goes at a time, equally far apart: use --local-steps {near}"
        raise UserError(f"local_steps {steps} with fragments {parts}", "a multiple", remedy)
    if config.overlap_steps > config.round_steps:
        got = f"overlap_steps {config.overlap_steps} with {config.round_steps} steps a round"
        remedy = "one exchange is under way at a time"
        raise UserError(got, f"overlap_steps <= {config.round_steps}", remedy)
    if not config.streaming:
        return
    what = "fragments, overlap_steps or mixing"
    if _averages_slots(config):
        remedy = "a round exchanges parameters alone: add --local-slots keep"
        raise UserError(f"{what} with local_slots 'average'", "'keep', or optimizer 'sgd'", remedy)
    if config.reduce == "allreduce":
        remedy = "they have an exchange of their own: leave out --reduce"
        raise UserError(f"{what} with reduce 'allreduce'", "reduce 'auto' or 'shared'", remedy)


def _check_powersgd(config: Config) -> None:
    if config.backup_workers:
        remedy = "servers take each worker's gradient by itself: use another --codec"
        raise UserError("codec 'powersgd' and backup_workers", "one of the two", remedy)
    if config.pull_codec != "none":
        remedy = "every node makes the update itself: leave out --pull-codec"
        got = f"pull_codec {config.pull_codec!r} with codec 'powersgd'"
        raise UserError(got, "pull_codec 'none'", remedy)


def check_resume(saved: Config, now: Config, run: Path | None = None) -> None:
    """Check that a resumed run keeps what its layout, slots and order of samples depend on.

    Files that were moved to another folder under the same name count as the same.

    Raises:
        UserError: For the first of `LAYOUT_FIELDS` that differs, with both values.
    """
    where = f" {run}" if run else ""
    for name, old, new in _other_layout(saved, now):
        got = f"{name} {shown(new)} on resume"
        remedy = f"leave out {OPTIONS[name].flag}, or begin a new run with another --out"
        raise UserError(got, f"{shown(old)} as in the saved run{where}", remedy)


def check_saved(file: Config, sealed: Config, path: Path, remedy: str) -> None:
    """Check that a run's file has what the layout, slots and order of its checkpoints depend on.

    Raises:
        UserError: For the first of `LAYOUT_FIELDS` that differs; ends in `remedy`.
    """
    for name, old, new in _other_layout(sealed, file):
        got = f"{path}: {name} {shown(new)}, which was changed by hand"
        remedy = f"write {name} = {shown(old)} there, {remedy}"
        raise UserError(got, f"{shown(old)} as in its checkpoints", remedy)


def _other_layout(before: Config, now: Config) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, old and new value of each of `LAYOUT_FIELDS` that differs; see `check_resume`."""
    for name in LAYOUT_FIELDS:
        old, new = getattr(before, name), getattr(now, name)
        if old != new and (name not in FILES or _moved(old) != _moved(new)):
            yield name, old, new


def differences(before: Config, now: Config) -> list[tuple[str, Any, Any]]:
    """Return name, old and new value of what differs between a run's configurations.

    What is said anew at each start is left out, and a rate that is the rule's own is none.
    """
    names = [name for name in OPTIONS if name not in SESSION_FIELDS]
    pairs = [(k, getattr(before, k), getattr(now, k)) for k in names if k != "lr"]
    pairs.append(("lr", before.learning_rate, now.learning_rate))
    return [(k, old, new) for k, old, new in pairs if old != new]


def _moved(names: str) -> str:
    """Return the names of files without their folders: ``x.h5,y.h5`` for ``a/x.h5,b/y.h5``.

    The files may be gone. A comma belongs to a folder's name where no file's suffix stands before
    it: ``x.h5`` for ``a,b/x.h5``.
    """
    files, mark, arrays = names.partition("::")
    found = [PurePath(file) for file in files.split(",")]
    if found[-1].suffix and not any(file.suffix for file in found[:-1]):
        found = [PurePath(files)]
    return ",".join(file.name for file in found) + mark + arrays
