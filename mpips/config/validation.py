"""Validation of a configuration: options alone, and against each other."""

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeAlias

from mpips.config import OPTIONS, Config
from mpips.config.delay import parse_delays
from mpips.config.groups import parse_groups, parse_rule
from mpips.config.names import LAYOUT_FIELDS, PULL_CODECS, SESSION_FIELDS
from mpips.config.option import BOUNDS, shown
from mpips.errors import UserError

FILES = ("problem", "dataset", "test_dataset", "optimizer")  # options that name files
Legal: TypeAlias = tuple[Any, ...] | str
"""Values, or one of `BOUNDS`."""
ADAMS = ("adam", "adamw", "amsgrad", "nadam", "radam")
ADAPTIVE = ("adagrad", "rmsprop", "adadelta", *ADAMS)
COMPENSATED = "a server has to know what each gradient was computed from"
COUNTED = "servers take each worker's gradient by itself"
STREAMED = "streamed fragments have an exchange of their own"
UNPACKED = "MPI adds up what is not packed"


class Need(NamedTuple):
    """Requirement of an option: another option must have certain values.

    Attributes:
        name: Name of the option.
        other: Name of the other option.
        legal: Values that the other option may have.
        why: Reason, if the names do not show it.
        of: Values of the option with this requirement. Default: all but 0 and the option's default.
    """

    name: str
    other: str
    legal: Legal
    why: str = ""
    of: Legal = ()

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Return whether options satisfy the requirement; `values` may lack defaults."""
        value = values.get(self.name, OPTIONS[self.name].default)
        has_need = _asks(self.name, value) and (not self.of or _among(value, self.of))
        return not has_need or self.is_met(values)

    def is_met(self, values: Mapping[str, Any]) -> bool:
        """Return whether the other option has a legal value.

        A user's own problem always meets it.
        """
        other = values.get(self.other, OPTIONS[self.other].default)
        own_problem = self.other == "problem" and other not in OPTIONS["problem"].legal
        return own_problem or _among(other, self.legal)

    def error(self, values: Mapping[str, Any]) -> UserError:
        """Return the error for options that do not satisfy the requirement."""
        value, found = shown(values[self.name]), shown(values[self.other])
        flag, other = OPTIONS[self.name].flag, OPTIONS[self.other].flag
        legal, remedy = self.legal, f"set {other}, or leave out {flag}"
        if not isinstance(legal, str):
            unasked = not any(_asks(self.other, value) for value in legal)
            instead = f" or {other}" if unasked else f", or use {other} {' or '.join(legal)}"
            remedy = f"leave out {flag}{instead}"
            legal = " or ".join(map(shown, legal))
        reason = f"{self.why}: " if self.why else ""
        got = f"{self.name} {value} with {self.other} {found}"
        return UserError(got, f"{self.other} {legal}", f"{reason}{remedy}")


def _among(value: Any, legal: Legal) -> bool:
    if isinstance(legal, str):
        return value is None or BOUNDS[legal](value)
    return value in legal


def _asks(name: str, value: Any) -> bool:
    """Return whether a value is neither the option's default nor 0."""
    return value not in (OPTIONS[name].default, 0)


# Options that have an effect only with certain values of another option.
BESIDE: dict[str, Need] = {
    need.name: need
    for need in (
        Need("hidden", "problem", ("mlp", "wide_deep")),
        Need("activation", "problem", ("mlp", "wide_deep")),
        Need("factors", "problem", ("factorization_machine", "wide_deep")),
        Need("test_fraction", "test_dataset", ("",)),
        Need("momentum", "optimizer", ("momentum", "nesterov")),
        Need("beta1", "optimizer", (*ADAMS, "lion")),
        Need("beta2", "optimizer", (*ADAMS, "lion")),
        Need("eps", "optimizer", ADAPTIVE),
        Need("decay", "optimizer", ("rmsprop", "adadelta")),
        Need("step_every", "schedule", ("step",)),
        Need("step_factor", "schedule", ("step",)),
        Need("epochs", "steps", (0,)),
        Need("topk_ratio", "codec", ("topk",)),
        Need("topk_momentum", "codec", ("topk",)),
        Need("topk_warmup", "codec", ("topk",)),
        Need("powersgd_rank", "codec", ("powersgd",)),
    )
}
NEEDS = (
    *BESIDE.values(),
    Need("server_ranks", "server_hosts", ("",)),
    Need("server_hosts", "servers", ">= 1"),
    Need("scale_lr", "on_death", ("shrink",)),
    Need("delay_adaptive", "delay_compensation", "> 0"),
    Need("delay_compensation", "prefetch", (False,), COMPENSATED),
    Need("delay_compensation", "node_aggregation", (False,), COMPENSATED),
    Need("record", "read", ("consistent",), "what a torn read saw cannot be made again"),
    Need("record", "node_aggregation", (False,)),
    Need("record", "on_death", ("restart",), "all ranks of a round are to be there"),
    Need("record", "pull_codec", ("none",), "replies are packed by draws that are not kept"),
    Need("backup_workers", "reduce", ("auto",), "each worker's gradient is counted by itself"),
    Need("target_accuracy", "eval_every", "> 0", "it is checked at evaluations"),
    Need("evaluators", "eval_every", "> 0"),
    Need("patience", "evaluators", ">= 1", "they evaluate checkpoints"),
    Need("keep_best", "evaluators", ">= 1", "they evaluate checkpoints"),
    Need("schedule", "step_every", ">= 1", of=("step",)),
    Need("schedule", "warmup_steps", ">= 1", of=("warmup",)),
    Need("pull_codec", "far_read", ("auto", "reply"), "only an owner packs", PULL_CODECS[2:]),
    Need("far_read", "read", ("relaxed",), "a consistent read is a reply", ("get",)),
    Need("prefetch", "read", ("relaxed",), "a server would pause for a whole step"),
    Need("codec", "reduce", ("auto", "shared"), UNPACKED),
    Need("pull_codec", "reduce", ("auto", "shared"), UNPACKED),
    Need("topk_momentum", "optimizer", ("sgd",), "the servers' rule would smooth once more"),
    Need("codec", "backup_workers", (0,), COUNTED, ("powersgd",)),
    Need("codec", "pull_codec", ("none",), "every node makes the update itself", ("powersgd",)),
    Need("fragments", "reduce", ("auto", "shared"), STREAMED),
    Need("overlap_steps", "reduce", ("auto", "shared"), STREAMED),
    Need("mixing", "reduce", ("auto", "shared"), STREAMED, "in (0, 1)"),
    Need("outer_nesterov", "outer_momentum", "> 0"),
)


def applies(name: str, values: Mapping[str, Any]) -> bool:
    """Return whether an option has an effect, given a job's mode and its other options.

    Args:
        name: Name of the option.
        values: The job's options, without defaults.
    """
    modes = OPTIONS[name].modes
    if modes and values.get("mode", OPTIONS["mode"].default) not in modes:
        return False
    return name not in BESIDE or BESIDE[name].is_met(values)


def validate(config: Config) -> None:
    """Check every field, and fields against each other, as far as possible without the ranks.

    Raises:
        UserError: For the first error.
    """
    values = vars(config)
    for name, option in OPTIONS.items():
        option.check(values[name])
    for name, option in OPTIONS.items():
        if not option.fits(values[name], config.mode):
            raise option.mode_error(values[name], config.mode)
    for need in NEEDS:
        if not need.holds(values):
            raise need.error(values)
    parse_delays(config.inject_delay)
    parse_groups(config.groups)
    parse_rule(config.row_optimizer, "row_optimizer")
    parse_rule(config.optimizer, "optimizer")
    _check_servers(config)
    _check_length(config)
    _check_local_steps(config)
    if not config.dataset:
        raise UserError("dataset ''", "a name or the path of a file", "set --dataset")
    if config.eval_only and not (config.resume or config.init_from):
        raise UserError("eval_only without a checkpoint", "--resume or --init-from CHECKPOINT")
    if config.eval_ema and not (config.eval_only or (config.ema and config.evaluators)):
        remedy = "they evaluate checkpoints, which have the average"
        raise UserError("eval_ema by itself", "ema > 0 and evaluators >= 1", remedy)
    if config.eval_only and config.quiet and not config.out:
        raise UserError("eval_only and quiet without out", "a place for the result", "give --out")


def _check_servers(config: Config) -> None:
    ranks = config.server_ranks
    if len(set(ranks)) < len(ranks):
        raise UserError(f"server_ranks {shown(ranks)}", "distinct ranks", "name each rank once")
    if ranks and config.servers not in (None, len(ranks)):
        got = f"servers {config.servers} with {len(ranks)} server_ranks"
        raise UserError(got, f"servers {len(ranks)}", "leave out --servers")
    if config.backup_workers and not (config.servers or ranks):
        remedy = "servers count who comes first: give --servers N"
        raise UserError(f"backup_workers {config.backup_workers} without servers", "both", remedy)


def _check_length(config: Config) -> None:
    if not (config.epochs or config.steps or config.eval_only):
        raise UserError("epochs 0 and steps 0", "epochs >= 1 or steps >= 1", "set --epochs")
    if config.target_accuracy and config.problem == "linear":
        got = f"target_accuracy {config.target_accuracy} with problem 'linear'"
        remedy = "a regression has none: leave out --target-accuracy"
        raise UserError(got, "a problem with an accuracy", remedy)
    # In other modes an update is one worker's step, so their number depends on the ranks.
    if config.in_rounds and 0 < config.steps <= config.warmup_steps:
        got = f"warmup_steps {config.warmup_steps} with steps {config.steps}"
        raise UserError(got, f"warmup_steps < {config.steps}", "set --warmup-steps")


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
    packed = config.mode == "local_sgd" and config.codec != "none"
    averages_slots = config.local_slots == "average" and config.optimizer != "sgd"
    if averages_slots and (packed or config.streaming):
        what = f"codec {config.codec!r}" if packed else "fragments, overlap_steps or mixing"
        remedy = "a round exchanges parameters alone: add --local-slots keep"
        raise UserError(f"{what} with local_slots 'average'", "'keep', or optimizer 'sgd'", remedy)


def check_resume(saved: Config, now: Config, run: Path | None = None) -> None:
    """Check that a resumed run keeps the options that determine layout, slots and order of samples.

    Files that were moved to another folder under the same name count as unchanged.

    Raises:
        UserError: For the first of `LAYOUT_FIELDS` that differs, with both values.
    """
    where = f" {run}" if run else ""
    for name, old, new in _other_layout(saved, now):
        got = f"{name} {shown(new)} on resume"
        remedy = f"leave out {OPTIONS[name].flag}, or begin a new run with another --out"
        raise UserError(got, f"{shown(old)} as in the saved run{where}", remedy)


def check_saved(file: Config, sealed: Config, path: Path, remedy: str) -> None:
    """Check that a run's file agrees with its checkpoints in layout, slots and order of samples.

    Raises:
        UserError: For the first of `LAYOUT_FIELDS` that differs; ends with `remedy`.
    """
    for name, old, new in _other_layout(sealed, file):
        got = f"{path}: {name} {shown(new)}, which was changed by hand"
        remedy = f"write {name} = {shown(old)} there, {remedy}"
        raise UserError(got, f"{shown(old)} as in its checkpoints", remedy)


def _other_layout(before: Config, now: Config) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, old and new value of each of `LAYOUT_FIELDS` that differs; see `check_resume`."""
    for name in LAYOUT_FIELDS:
        old, new = getattr(before, name), getattr(now, name)
        if name == "optimizer":  # the hyperparameters of a user's rule may change
            old, new = (parse_rule(text, name).name for text in (old, new))
        if old != new and (name not in FILES or _moved(old) != _moved(new)):
            yield name, old, new


def differences(before: Config, after: Config) -> list[tuple[str, Any, Any]]:
    """Return name, old and new value of each option that differs between a run's configurations.

    Options of a single start are ignored. An unset rate counts as the rule's default.
    """
    names = [name for name in OPTIONS if name not in SESSION_FIELDS]
    pairs = [(k, getattr(before, k), getattr(after, k)) for k in names if k != "lr"]
    pairs.append(("lr", before.learning_rate, after.learning_rate))
    return [(k, old, new) for k, old, new in pairs if old != new]


def _moved(names: str) -> str:
    """Return the names of files without their folders: ``x.h5,y.h5`` for ``a/x.h5,b/y.h5``.

    The files may not exist any more. A comma belongs to a folder's name if no suffix of a file
    precedes it: ``x.h5`` for ``a,b/x.h5``.
    """
    files, mark, arrays = names.partition("::")
    found = [PurePath(file) for file in files.split(",")]
    if found[-1].suffix and not any(file.suffix for file in found[:-1]):
        found = [PurePath(files)]
    return ",".join(file.name for file in found) + mark + arrays
