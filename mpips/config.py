"""The configuration of a run: one frozen dataclass, a TOML job file, a command line.

Every field of `Config` is ``--option-name`` on the command line and ``option_name`` in the job
file. Precedence is command line, job file, saved run (on resume), defaults; no environment
variables. A field's metadata says its group, its help and what is legal, and feeds ``--help``,
the job file that a run writes, and every error message.
"""

import dataclasses
import math
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from mpips import __version__
from mpips.errors import UserError, nearest

LEARNING_RATES = {
    "sgd": 0.1,
    "momentum": 0.05,
    "nesterov": 0.05,
    "adagrad": 0.02,
    "rmsprop": 0.001,
    "adam": 0.002,
    "adamw": 0.001,
}
OPTIMIZERS = tuple(LEARNING_RATES)
PROBLEMS = ("linear", "softmax", "mlp")
SCHEDULES = ("constant", "warmup", "cosine", "step")
# What the shapes, the slots or the order of the samples depend on.
LAYOUT_FIELDS = (
    *("problem", "hidden", "activation", "dtype", "optimizer"),
    *("dataset", "test_dataset", "test_fraction", "classes", "batch_size", "shuffle", "seed"),
)
# What is said anew at each start: a resumed run does not take these from the saved one.
SESSION_FIELDS = ("out", "resume", "quiet", "eval_only")
FLAGS = {
    "--help": "show this text, and end",
    "--version": "show the version, and end",
    "--print-config": "show the resolved job as a job file, and end",
}
BOUNDS: dict[str, Callable[[float], bool]] = {
    "> 0": lambda v: v > 0,
    ">= 0": lambda v: v >= 0,
    ">= 1": lambda v: v >= 1,
    "in [0, 1]": lambda v: 0 <= v <= 1,
    "in [0, 1)": lambda v: 0 <= v < 1,
    "in (0, 1)": lambda v: 0 < v < 1,
}
KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    tuple: "a list of integers",
}
METAVARS: dict[Any, str] = {bool: "", int: "N", float: "X", str: "TEXT", tuple: "N,N,..."}
PERIOD = re.compile(r"(?P<seconds>[0-9]{1,12}(\.[0-9]{1,12})?)s?|(?P<steps>[0-9]{1,12})steps")
USER_PROBLEM = re.compile(r".*[^/]\.py:[^\W\d]\w*")
INT_LIMIT = 2**63
HELP_WIDTH = 100
HELP_COLUMN = 30


def _option(group: str, default: Any, text: str, bound: str = "", **metadata: Any) -> Any:
    """Make a field of `Config`; metadata: legal, pattern, form, metavar, unset, bare, numeric."""
    metadata = {"group": group, "help": text, "bound": bound, **metadata}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Config:
    """A resolved job; ``--help`` tells the meaning of each field. `resolve` makes valid ones."""

    mode: str = _option(
        "run", "async", "servers apply gradients as they come, or all ranks go in rounds",
        legal=("async", "sync"),
    )  # fmt: skip
    out: str = _option(
        "run", "", "folder of the run", metavar="DIR", unset="runs/<problem>-<mode>-<time>"
    )
    resume: str = _option(
        "run", "", "continue the run in --out; auto: continue it, or start one if there is none",
        legal=("", "yes", "auto"), bare="yes", metavar="[yes|auto]", unset="start a new run",
    )  # fmt: skip
    seed: int = _option("run", 0, "seed of the initial parameters and of the order", ">= 0")
    quiet: bool = _option("run", False, "print errors only")
    eval_only: bool = _option("run", False, "evaluate what --resume or --init-from reads")
    init_from: str = _option(
        "run", "", "start a run from this checkpoint's parameters alone; unused on --resume",
        metavar="CHECKPOINT", unset="a random start",
    )  # fmt: skip
    threads: int = _option("run", 0, "BLAS threads a rank; 0: cores over ranks of a node", ">= 0")

    servers: int | None = _option(
        "cluster", None, "number of servers; 0 (sync only): every rank is a worker", ">= 0",
        unset="async: max(1, ranks // 4), sync: 0",
    )  # fmt: skip
    server_ranks: tuple[int, ...] = _option(
        "cluster", (), "the ranks that are servers", ">= 0", unset="spread over the nodes"
    )
    server_hosts: str = _option(
        "cluster", "", "place the servers on the hosts that match", metavar="GLOB", unset="any host"
    )
    node_size: int = _option(
        "cluster", 0, "treat N consecutive ranks as a node; 0: the real nodes", ">= 0"
    )
    window: str = _option(
        "cluster", "shared", "memory of the shards; private: no shared memory, the far path only",
        legal=("shared", "private"),
    )  # fmt: skip
    reduce: str = _option(
        "cluster", "auto", "how a round of mode sync sums: in node-shared memory or MPI_Allreduce",
        legal=("auto", "shared", "allreduce"),
    )  # fmt: skip
    inbox: int = _option(
        "cluster", 2, "far pushes that a server receives at a time; each takes a shard",
        ">= 1",
    )  # fmt: skip
    read: str = _option(
        "cluster", "relaxed", "what a pull of mode async may see; consistent: one version a shard",
        legal=("relaxed", "consistent"),
    )  # fmt: skip

    problem: str = _option(
        "model", "mlp", "model and loss, or your own class", legal=PROBLEMS, metavar="NAME",
        pattern=USER_PROBLEM, form="path/file.py:Class",
    )  # fmt: skip
    hidden: tuple[int, ...] = _option("model", (128,), "widths of the hidden layers of mlp", ">= 1")
    activation: str = _option("model", "relu", "activation of mlp", legal=("relu", "tanh"))
    dtype: str = _option(
        "model", "float32", "type of parameters and gradients", legal=("float32", "float64")
    )

    dataset: str = _option(
        "data", "digits", "digits, or a file: .h5[::x,y], .npz, x.npy,y.npy, IDX (.gz), .svm",
        metavar="NAME_OR_PATH",
    )  # fmt: skip
    test_dataset: str = _option(
        "data", "", "held-out samples in a file of their own", metavar="PATH",
        unset="a part of --dataset",
    )  # fmt: skip
    test_fraction: float = _option("data", 0.2, "part of --dataset that is held out", "in (0, 1)")
    classes: int = _option("data", 0, "number of classes; 0: inferred from the labels", ">= 0")
    scale: float = _option("data", 1.0, "factor on every input", "> 0")
    batch_size: int = _option("data", 32, "samples in one step of one worker", ">= 1")
    shuffle: bool = _option("data", True, "a new order of the samples in each epoch")

    optimizer: str = _option(
        "optimisation", "adam", "update rule", legal=OPTIMIZERS, metavar="NAME"
    )
    lr: float | None = _option(
        "optimisation", None, "learning rate", "> 0",
        unset=", ".join(f"{name} {lr:g}" for name, lr in LEARNING_RATES.items()),
    )  # fmt: skip
    momentum: float = _option("optimisation", 0.9, "of momentum and nesterov", "in [0, 1)")
    beta1: float = _option("optimisation", 0.9, "decay of the mean, adam and adamw", "in [0, 1)")
    beta2: float = _option("optimisation", 0.999, "decay of the square, adam, adamw", "in [0, 1)")
    eps: float = _option("optimisation", 1e-8, "added to a divisor (adaptive rules)", "> 0")
    decay: float = _option("optimisation", 0.9, "decay of the square, rmsprop", "in [0, 1)")
    weight_decay: float = _option(
        "optimisation", 0.0, "L2 term of the gradient; decoupled in adamw", ">= 0"
    )
    clip: float = _option("optimisation", 0.0, "largest norm of a gradient; 0: no limit", ">= 0")
    schedule: str = _option(
        "optimisation", "constant", "course of the learning rate", legal=SCHEDULES
    )
    warmup_steps: int = _option("optimisation", 0, "updates of linear warm-up", ">= 0")
    step_every: int = _option("optimisation", 0, "updates between steps of schedule step", ">= 0")
    step_factor: float = _option("optimisation", 0.1, "factor of each step of the schedule", "> 0")
    epochs: int = _option("optimisation", 30, "passes over the data, resumed ones included", ">= 0")
    steps: int = _option("optimisation", 0, "steps of each worker; 0: as --epochs says", ">= 0")
    target_accuracy: float = _option(
        "optimisation", 0.0, "stop at this held-out accuracy; 0: never", "in [0, 1]"
    )

    eval_every: float = _option("output", 1.0, "epochs between evaluations; 0: at the end", ">= 0")
    log_every: float = _option("output", 0.25, "seconds between progress lines", ">= 0")

    checkpoint_every: str = _option(
        "checkpoints", "60", "period of the checkpoints; 0: the first and the last only",
        pattern=PERIOD, form="SECONDS (such as 60) or Nsteps (such as 500steps)",
        metavar="PERIOD", numeric=True,
    )  # fmt: skip
    keep: int = _option("checkpoints", 3, "number of checkpoints that are kept", ">= 1")
    snapshot: str = _option(
        "checkpoints", "copy", "copy the shard and go on, or stall until it is written",
        legal=("copy", "stall"),
    )  # fmt: skip

    @property
    def learning_rate(self) -> float:
        """The learning rate: `lr`, or the optimizer's own default where it is unset."""
        return LEARNING_RATES[self.optimizer] if self.lr is None else self.lr

    @property
    def checkpoint_period(self) -> tuple[float | None, int | None]:
        """The period of checkpoints, ``(seconds, steps)``, at most one of them not None."""
        match = PERIOD.fullmatch(self.checkpoint_every)
        if match is None:
            raise OPTIONS["checkpoint_every"].error(self.checkpoint_every)
        seconds, steps = float(match["seconds"] or 0), int(match["steps"] or 0)
        return seconds or None, steps or None


@dataclass(frozen=True)
class Option:
    """What is known of one field of `Config`: its type, its legal values, its help."""

    name: str
    kind: Any
    default: Any
    group: str
    help: str
    bound: str
    optional: bool = False
    legal: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    form: str = ""
    metavar: str = ""
    unset: str = ""
    bare: str | None = None
    numeric: bool = False

    @classmethod
    def of(cls, field: "dataclasses.Field[Any]") -> "Option":
        """Read an option off a field of `Config`."""
        union = isinstance(field.type, types.UnionType)
        kind = typing.get_args(field.type)[0] if union else field.type
        kind = typing.get_origin(kind) or kind
        return cls(field.name, kind, field.default, optional=union, **field.metadata)

    @property
    def flag(self) -> str:
        """The option on the command line, such as ``--batch-size``."""
        return "--" + self.name.replace("_", "-")

    @property
    def expected(self) -> str:
        """The constraint on a value, in words."""
        if self.legal or self.form:
            names = ", ".join(filter(None, (*self.legal, self.form)))
            return f"one of {names}" if self.legal else names
        return f"{KINDS[self.kind]} {self.bound}".rstrip()

    def error(self, value: Any, where: str = "", remedy: str = "") -> UserError:
        """Make the error for an illegal value; `where` names the file that it stands in."""
        if self.legal and isinstance(value, str):
            got = f"{where}unknown {self.name} {value!r}"
            return UserError(got, self.expected, nearest(value, self.legal) or remedy)
        large = self.kind is int and type(value) is int and abs(value) >= INT_LIMIT
        expected = "an integer below 2**63" if large else self.expected
        return UserError(f"{where}{self.name} {_shown(value)}", expected, remedy)

    def check(self, value: Any, where: str = "", remedy: str = "") -> Any:
        """Return `value` as the field holds it.

        Args:
            value: A value as TOML gives it: lists for tuples, integers where numbers may stand.
            where: Prefix of the error, such as the file's name and a colon.
            remedy: End of the error.

        Raises:
            UserError: If the type or the value is not legal.
        """
        if value is None and self.optional:
            return value
        if self.numeric and type(value) in (int, float) and abs(value) < INT_LIMIT:
            value = str(value)
        if self.kind is float and type(value) is int and abs(value) < INT_LIMIT:
            value = float(value)
        if self.kind is tuple and isinstance(value, list):
            value = tuple(value)
        if not self._accepts(value):
            raise self.error(value, where, remedy)
        return value

    def _accepts(self, value: Any) -> bool:
        """Say whether a value has the field's type and is legal; bool is no integer here."""
        if type(value) is not self.kind:
            return False
        if self.kind is str:
            return self._accepts_text(value)
        items = value if self.kind is tuple else (value,)
        number = float if self.kind is float else int
        if self.kind is not bool and any(type(v) is not number or not _finite(v) for v in items):
            return False
        return not self.bound or all(BOUNDS[self.bound](v) for v in items)

    def _accepts_text(self, value: str) -> bool:
        # Lone surrogates (a command line that is not UTF-8) cannot be written to a job file.
        if "\0" in value or any("\ud800" <= c <= "\udfff" for c in value):
            return False
        if value in self.legal:
            return True
        if self.pattern is not None:
            return self.pattern.fullmatch(value) is not None
        return not self.legal

    def from_text(self, text: str) -> Any:
        """Return the typed value of a command line's word, or the word if it is not one."""
        try:
            if self.kind is tuple:
                return tuple(_integer(part) for part in text.split(",")) if text else ()
            return {int: _integer, float: _number}.get(self.kind, str)(text)
        except ValueError:
            return text


def _shown(value: Any) -> str:
    """Return a value as a job file would show it."""
    if isinstance(value, bool):
        return str(value).lower()
    try:
        return repr(list(value) if isinstance(value, tuple) else value)
    except ValueError:  # Python refuses to write integers of thousands of digits.
        return "with an endless integer"


def _finite(value: float) -> bool:
    return abs(value) < INT_LIMIT if isinstance(value, int) else math.isfinite(value)


def _integer(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError(text)
    return int(text)


def _number(text: str) -> float:
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
        raise ValueError(text)
    return float(text)


OPTIONS = {field.name: Option.of(field) for field in dataclasses.fields(Config)}
_BY_FLAG = {option.flag: option for option in OPTIONS.values()}
_NEGATED = {f"--no-{o.flag[2:]}": o for o in OPTIONS.values() if o.kind is bool}


class CommandLine(NamedTuple):
    """What a command line says, before anything is read.

    Attributes:
        job: Path of the job file, or None.
        options: Values of the options that were given, typed and checked one by one.
        flags: Those of ``help``, ``version``, ``print_config`` that were given.
    """

    job: Path | None
    options: dict[str, Any]
    flags: frozenset[str]


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Read a command line without the program's name; an option given twice counts as its last.

    Raises:
        UserError: For an unknown option, an illegal or missing value, a second job file.
    """
    if "--help" in argv or "-h" in argv:
        return CommandLine(None, {}, frozenset({"help"}))
    job: Path | None = None
    options: dict[str, Any] = {}
    flags: set[str] = set()
    words = list(reversed(argv))
    while words:
        word = words.pop()
        if word in FLAGS:
            flags.add(word[2:].replace("-", "_"))
        elif word.startswith("-"):
            name, value = _take_option(word, words)
            options[name] = value
        elif job is not None:
            raise UserError(f"a second job file {word!r}", "only one", "options begin with --")
        else:
            job = Path(word)
    return CommandLine(job, options, frozenset(flags))


def _take_option(word: str, words: list[str]) -> tuple[str, Any]:
    """Return ``(name, value)`` of an option; its value, if a word of its own, leaves `words`."""
    flag, equals, text = word.partition("=")
    option = _BY_FLAG.get(flag) or _NEGATED.get(flag)
    if option is None:
        near = nearest(flag, [*_BY_FLAG, *_NEGATED, *FLAGS])
        raise UserError(f"unknown option {flag}", "one of those that --help lists", near)
    if option.kind is bool:
        if equals:
            raise UserError(f"option {word}", "no value", f"write {flag}, without a value")
        return option.name, flag in _BY_FLAG
    if not equals:
        text = _take_value(option, words)
    return option.name, option.check(option.from_text(text), remedy=f"see {flag} in --help")


def _take_value(option: Option, words: list[str]) -> str:
    if option.bare is not None:
        return words.pop() if words and words[-1] in option.legal else option.bare
    if not words or words[-1].startswith("--"):
        usage = f"write {option.flag} {_metavar(option)}"
        raise UserError(f"option {option.flag} without a value", option.expected, usage)
    return words.pop()


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a job file, or a saved run's ``config.toml``.

    Returns:
        The values that it sets, by field name, typed and checked one by one.

    Raises:
        UserError: If the file cannot be read, is not TOML, or holds an unknown key or an illegal
            value. Names the file, and the line of a syntax error.
    """
    path = Path(path)
    if path.suffix.lower() != ".toml":
        remedy = "options begin with -- (see --help)"
        raise UserError(f"job file {str(path)!r}", "a path that ends in .toml", remedy)
    try:
        return _read_values(path.read_bytes().decode(), str(path))
    except FileNotFoundError:
        near = nearest(path.name, (p.name for p in path.parent.glob("*.toml")))
        error = UserError(f"job file {str(path)!r} not found", "an existing file", near)
    except OSError as problem:
        error = UserError(f"job file {str(path)!r}: {problem.strerror}", "a readable file")
    except UnicodeDecodeError as problem:
        error = UserError(f"job file {str(path)!r}: {problem}", "text in UTF-8")
    raise error


def _read_values(text: str, source: str) -> dict[str, Any]:
    """Parse TOML text and check each key and value; `source` is named in errors."""
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as problem:
        remedy = 'text stands in quotes: mode = "sync"'
        raise UserError(f"{source}: {problem}", "TOML", remedy) from None
    return {key: _checked_key(key, value, source) for key, value in values.items()}


def _checked_key(key: str, value: Any, source: str) -> Any:
    if key in OPTIONS:
        example = "" if OPTIONS[key].kind is str else "numbers and true/false stand without quotes"
        return OPTIONS[key].check(value, f"{source}: ", example if isinstance(value, str) else "")
    if isinstance(value, dict):
        raise UserError(f"{source}: table [{key}]", "keys without tables", "remove the headline")
    expected = "one of those that --help lists, with _ for -"
    raise UserError(f"{source}: unknown key {key!r}", expected, nearest(key, OPTIONS))


def resolve(
    options: Mapping[str, Any],
    job: Mapping[str, Any] | None = None,
    saved: Mapping[str, Any] | None = None,
) -> Config:
    """Merge ``options`` over ``job`` over ``saved`` over the defaults, and validate the result.

    Args:
        options: From the command line.
        job: From the job file.
        saved: From the ``config.toml`` of the run that is resumed; its `SESSION_FIELDS` are
            not taken over.

    Raises:
        UserError: If the result is not valid.
    """
    kept = {k: v for k, v in (saved or {}).items() if k not in SESSION_FIELDS}
    config = Config(**{**kept, **(job or {}), **options})
    validate(config)
    return config


def load(argv: Sequence[str], saved: Mapping[str, Any] | None = None) -> Config:
    """Resolve a command line and the job file that it names.

    Args:
        argv: The command line without the program's name.
        saved: Values of the run that is resumed, as `read_toml` gives them.

    Raises:
        UserError: If anything is wrong with the command line, the file or the values, or if
            they differ from `saved` in what a resumed run may not change.
        SystemExit: With code 0, after printing what ``--help``, ``--version`` or
            ``--print-config`` ask for. A program of many ranks lets one of them print
            `requested_text` and calls `parse_command_line`, `read_toml`, `resolve` itself.
    """
    line = parse_command_line(argv)
    text = requested_text(line, None)
    if text is None:
        config = resolve(line.options, read_toml(line.job) if line.job else None, saved)
        if saved is not None:
            check_resume(Config(**saved), config)
        text = requested_text(line, config)
    if text is None:
        return config
    print(text, end="")
    raise SystemExit(0)


def requested_text(line: CommandLine, config: Config | None) -> str | None:
    """Return the text that the flags of a command line ask for, or None to go on.

    Args:
        line: The command line.
        config: The resolved job, or None where it is not known yet (no ``--print-config`` then).
    """
    if "help" in line.flags:
        return help_text()
    if "version" in line.flags:
        return f"mpips {__version__}\n"
    return to_toml(config) if config is not None and "print_config" in line.flags else None


def validate(config: Config) -> None:
    """Check every field, and the fields against each other, as far as no world is needed.

    Raises:
        UserError: For the first thing that is wrong.
    """
    for name, option in OPTIONS.items():
        option.check(getattr(config, name))
    _check_servers(config)
    _check_length(config)
    _check_schedule(config)
    if not config.dataset:
        raise UserError("dataset ''", "a name or the path of a file", "set --dataset")
    if config.classes == 1:
        raise UserError("classes 1", "0 (inferred) or at least 2", "set --classes")
    if config.eval_only and not (config.resume or config.init_from):
        raise UserError("eval_only without a checkpoint", "--resume or --init-from CHECKPOINT")


def _check_servers(config: Config) -> None:
    ranks = config.server_ranks
    if config.mode == "async" and config.servers == 0:
        remedy = "only mode sync does without servers: use --mode sync"
        raise UserError("servers 0 in mode async", "servers >= 1", remedy)
    if len(set(ranks)) < len(ranks):
        raise UserError(f"server_ranks {_shown(ranks)}", "distinct ranks", "name each rank once")
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


def _check_schedule(config: Config) -> None:
    if config.schedule == "step" and not config.step_every:
        raise UserError("schedule 'step' with step_every 0", "step_every >= 1", "set --step-every")
    if config.schedule == "warmup" and not config.warmup_steps:
        remedy = "set --warmup-steps"
        raise UserError("schedule 'warmup' with warmup_steps 0", "warmup_steps >= 1", remedy)
    # In mode async an update is one worker's step, so that only a world gives their number.
    if config.mode == "sync" and 0 < config.steps <= config.warmup_steps:
        got = f"warmup_steps {config.warmup_steps} with steps {config.steps}"
        raise UserError(got, f"warmup_steps < {config.steps}", "set --warmup-steps")


def check_resume(saved: Config, now: Config) -> None:
    """Check that a resumed run keeps what its layout, slots and order of samples depend on.

    Files that were moved to another folder under the same name count as the same.

    Raises:
        UserError: For the first of `LAYOUT_FIELDS` that differs, with both values.
    """
    for name in LAYOUT_FIELDS:
        old, new = getattr(saved, name), getattr(now, name)
        if _identity(old) != _identity(new):
            got = f"{name} {_shown(new)} on resume"
            remedy = f"leave out {OPTIONS[name].flag}, or begin a new run with --init-from"
            raise UserError(got, f"{_shown(old)} as in the saved run", remedy)


def _identity(value: Any) -> Any:
    """Return a value without the folders of the files that it names."""
    if not isinstance(value, str):
        return value
    files, mark, arrays = value.partition("::")
    return ",".join(PurePath(file).name for file in files.split(",")) + mark + arrays


def to_toml(config: Config) -> str:
    """Return the job file of a configuration, by groups; fields that are None are left out."""
    lines: list[str] = []
    for group, options in _groups().items():
        values = {o.name: getattr(config, o.name) for o in options}
        text = "".join(_toml_line(k, v) for k, v in values.items() if v is not None)
        lines.append(f"# {group}\n{text}")
    return "\n".join(lines)


def _toml_line(name: str, value: Any) -> str:
    import tomli_w

    if isinstance(value, tuple):
        return f"{name} = {list(value)}\n"
    return tomli_w.dumps({name: value})


def from_toml(text: str, source: str = "job file") -> Config:
    """Return the configuration of a job file's text; the inverse of `to_toml`.

    Raises:
        UserError: If it is not TOML, or not valid; names `source`.
    """
    return resolve({}, _read_values(text, source))


def _groups() -> dict[str, list[Option]]:
    groups: dict[str, list[Option]] = {}
    for option in OPTIONS.values():
        groups.setdefault(option.group, []).append(option)
    return groups


def help_text() -> str:
    """Return the text of ``--help``, at most 100 columns wide."""
    intro = (
        "Every option is also a key of the job file, with _ for - (batch_size = 32), and the other "
        "way round. The command line overrides the job file, the job file overrides the defaults; "
        "with --resume, the saved run's values take the place of the defaults."
    )
    parts = [
        "usage: mpirun -n RANKS python -m mpips.train [JOB.toml] [--option value ...]\n",
        textwrap.fill(intro, HELP_WIDTH) + "\n",
    ]
    for group, options in _groups().items():
        parts.append(f"{group}:\n" + "".join(map(_help_entry, options)))
    parts.append("other:\n" + "".join(_help_row(*row) for row in FLAGS.items()))
    return "\n".join(parts)


def _metavar(option: Option) -> str:
    if option.legal and not option.metavar:
        return "{" + ",".join(option.legal) + "}"
    return option.metavar or METAVARS[option.kind]


def _help_entry(option: Option) -> str:
    """Return the rows of one option: what it does, what is legal, the default."""
    if option.kind is bool:
        default = "on" if option.default else "off"
        left = f"{option.flag}, --no-{option.flag[2:]}"
        return _help_row(left, f"{option.help} [default: {default}]")
    legal = option.expected if option.metavar and not option.bare else ""
    legal = option.bound or legal.removeprefix("text")
    default = ",".join(map(str, option.default)) if option.kind is tuple else str(option.default)
    default = f"default: {option.unset or default}"
    told = f"{legal}; {default}" if legal else default
    return _help_row(f"{option.flag} {_metavar(option)}", f"{option.help} [{told}]")


def _help_row(left: str, text: str) -> str:
    """Return `text` in the right column beside `left`, or below it where that is too long."""
    indent = " " * HELP_COLUMN
    head = f"  {left}".ljust(HELP_COLUMN)
    head = head if head[-1] == " " else f"{head}\n{indent}"
    body = textwrap.wrap(text, HELP_WIDTH - HELP_COLUMN, break_on_hyphens=False)
    return head + f"\n{indent}".join(body) + "\n"
