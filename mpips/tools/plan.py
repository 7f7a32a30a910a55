"""Prediction of a job: ``python -m mpips plan JOB.toml --workers 100 --link 10gbit``.

Predicts the time of a step, its parts, the staleness of gradients and the end of the job, by
formulas and a simulation. The cluster need not exist. All options of mpips.train set the job. With
``--from RUN``, the times are those that a run has measured. Without ``--workers`` too, the world is
that of the run, and the output compares both. The command does not start MPI.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpips.checkpoint.run_folder import CONFIG
from mpips.codecs.powersgd import Factors
from mpips.config import OPTIONS, Config
from mpips.config.command_line import parse_command_line
from mpips.config.jobfile import Parser, read_toml, resolve, verbatim
from mpips.config.names import SESSION_FIELDS, SPARSE_PROBLEMS
from mpips.config.option import Option, default_text, metavar
from mpips.datasets import open_dataset
from mpips.errors import UserError, answer
from mpips.layout.roles import default_servers
from mpips.planning.explain import codec_ratios
from mpips.planning.needs import Measured, measure
from mpips.planning.simulator import model
from mpips.planning.simulator.asked import (
    ASKED,
    BYTES,
    Asked,
    count,
    quantity,
    rate,
    seconds,
    shown_time,
)
from mpips.planning.simulator.model import MPICH, PAYLOAD, ROUND_COSTS, Run, Speeds
from mpips.planning.simulator.prediction import Facts, predict, told
from mpips.planning.simulator.search import search
from mpips.planning.simulator.text import comparison, proposal_text, text_of
from mpips.planning.world import World, spread
from mpips.problems import load_problem
from mpips.tools.report.record import Record, read

RATED = "training loss"  # the curve whose points have the number of samples
PLACING = {"mode", "servers", "server_ranks", "server_hosts"}  # options that choose servers


class _Known(NamedTuple):
    """Result of parsing a command line.

    Attributes:
        asked: Options of this command.
        config: Configuration of the job.
        facts: Model, speeds and costs, which are the same in all worlds.
        run: The run of ``--from``.
        own_world: Whether the world is that of the run.
        assumed: Values assumed for options that were not given, by name, as text.
    """

    asked: Asked
    config: Config
    facts: Facts
    run: Run | None
    own_world: bool
    assumed: dict[str, str]


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = verbatim("python -m mpips plan", __doc__)
    for option in ASKED.values():
        text = f"{option.help} [{option.bound + '; ' if option.bound else ''}default: "
        parser.add_argument(
            option.flag, type=partial(_typed, option),
            metavar=metavar(option), help=f"{text}{default_text(option)}]",
        )  # fmt: skip
    parser.add_argument("--from", dest="run", type=Path, metavar="RUN", help="folder of a run "
                        "whose job and measured times are taken")  # fmt: skip
    parser.add_argument("--compare", type=Path, nargs="+", metavar="RUN", help="folders of runs: a "
                        "table of what each did and what is predicted of it")  # fmt: skip
    parser.add_argument("--search", action="store_true", help="find the cheapest workers, servers, "
                        "mode and codec, of at most --workers")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="write JSON")
    return parser


def _typed(option: Option, text: str) -> Any:
    return option.check(option.from_text(text), remedy=f"see {option.flag} in --help")


def write(argv: Sequence[str]) -> str:
    """Return the plan for a command line as text.

    Raises:
        UserError: If the command line, the job, its data or the run is wrong, or the world is too
            small.
    """
    args, words = make_parser().parse_known_args(argv)
    given = {k: v for k in ASKED if (v := getattr(args, k)) is not None}
    if "deadline" in given and not args.search:
        raise UserError("--deadline without --search", "--search with it")
    if args.compare:
        if args.run or args.search or args.json:
            raise UserError("--compare with --from, --search or --json", "--compare without them")
        return _compared(args.compare, given, words)
    known = _known(args.run, given, words)
    if args.search:
        return _searched(known, args.json)
    if known.own_world and known.asked.nodes:
        raise UserError("--nodes without --workers", "both", "the ranks of a run have their nodes")
    config, hosts, node_of = known.config, *_world(known)
    prediction = predict(config, hosts, node_of, known.facts)
    run = known.run if known.own_world else None
    if not args.json:
        return text_of(prediction, known.assumed, run)
    inputs = {"assumed": known.assumed} | ({"run": dataclasses.asdict(run)} if run else {})
    return json.dumps({**told(prediction), **inputs}, indent=1) + "\n"


def _known(path: Path | None, given: Mapping[str, Any], words: Sequence[str]) -> _Known:
    asked, line = Asked(**given), parse_command_line(words)
    record = _record(path) if path else None
    job = read_toml(line.job) if line.job else {}
    chosen = {*line.options, *job}
    if record is not None:
        saved = {k: v for k, v in record.config.items() if k not in SESSION_FIELDS}
        job = {**{k: v for k, v in saved.items() if v is not None and k in OPTIONS}, **job}
    config = resolve(line.options, job)
    pace, start_s = (None, 0.0) if record is None else _pace(record, config)
    run = None if record is None else model.run_of(record.summary, config, pace)
    own = run is not None and not asked.workers
    if not asked.workers and run is None:
        raise UserError("a plan without a world", "--workers N", "or --from RUN")
    if own and run is not None and run.server_ranks and not chosen & PLACING:
        config = dataclasses.replace(config, server_ranks=run.server_ranks, servers=None)
    facts = _facts(config, asked, run, record, start_s)
    names = {*given, *line.options, *job}
    assumed = {k: v for k, v in _figures(config, asked, facts, run) if k not in names}
    start_up_s = None if record is None else _start_up_s(record, start_s)
    if start_up_s is None:
        assumed["start_up"] = shown_time(facts.start_s)
    else:
        facts = dataclasses.replace(facts, start_s=start_up_s)
    return _Known(asked, config, facts, run, own, assumed)


def _figures(
    config: Config, asked: Asked, facts: Facts, run: Run | None
) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each value that a plan may have to assume.

    The caller leaves out the names that the command line or the job file has.
    """
    if run is None:
        yield "parameters", f"{facts.measured.parameters:,} (problem {config.problem})"
        yield "samples", f"{facts.measured.n_train:,} (dataset {config.dataset})"
        yield "step_time", f"{shown_time(facts.speeds.step_s)} (measured here)"
        yield "mpi", MPICH
    yield "batch_size", str(config.batch_size)
    if not config.steps:
        yield "epochs", str(config.epochs)
    if run is None or asked.workers:
        if not (config.server_ranks or config.in_rounds):
            yield "servers", str(_servers(config, asked.workers))
        if not config.node_size:
            yield "nodes", "one a rank"
    for name in ("link", "latency", "jitter", "slow", "sample_bytes", "storage", "mtbf"):
        yield name, default_text(ASKED[name])
    if asked.mtbf:
        yield "restart", default_text(ASKED["restart"])


def _compared(paths: Sequence[Path], given: Mapping[str, Any], words: Sequence[str]) -> str:
    rows = []
    for path in paths:
        known = _known(path, given, words)
        if known.run is None or not known.own_world or known.asked.nodes:
            raise UserError("--compare with --workers or --nodes", "the world of each run")
        rows.append((path.name, predict(known.config, *_world(known), known.facts), known.run))
    return comparison(rows, Asked(**given).link)


def _record(path: Path) -> Record:
    if not (path / CONFIG).is_file():
        raise UserError(f"--from {path}", "the folder of a run")
    read_toml(path / CONFIG)  # raises an error where a record has no options
    record = read(path, path.name)
    if not record.summary:
        raise UserError(f"--from {path}", "a run that has ended", "it has no summary.json")
    return record


def _pace(record: Record, config: Config) -> tuple[float | None, float]:
    """Return the rate at which a run has trained, and the time before its first step.

    Returns:
        The rate between the first progress line and the last but one, in samples/s. None if workers
        may end at different times, or if there are too few lines. Then the seconds between the
        start of training and the first step, by that rate; 0 without a rate.
    """
    curve = record.curves.get(RATED)
    if curve is None or len(record.jobs) != 1 or (config.steps and not config.in_rounds):
        return None, 0.0
    points = curve.points[curve.points.samples > 0][:-1]
    if len(points) < 3 or points.seconds[-1] <= points.seconds[0]:
        return None, 0.0
    pace = float(np.ptp(points.samples) / np.ptp(points.seconds))
    return pace, max(0.0, float(points.seconds[0] - points.samples[0] / pace))


def _start_up_s(record: Record, before_s: float) -> float | None:
    """Return the seconds from a run's start to its first step, or None if unknown.

    Args:
        record: The run.
        before_s: Seconds between the start of training and the first step.
    """
    wall_s = record.summary.get("wall_s")
    if wall_s is None or not record.jobs:
        return None
    begin, end = record.jobs[-1]
    return max(0.0, float(wall_s) - (end - begin)) + before_s


def _facts(
    config: Config, asked: Asked, run: Run | None, record: Record | None, start_s: float
) -> Facts:
    """Return the facts of a plan: from the options of this command, else from the run or job."""
    given: dict[str, Any] = {
        "parameters": count(asked.parameters),
        "n_train": count(asked.samples),
        "grad_s": seconds(asked.step_time, 0.0),
    }
    given = {name: value for name, value in given.items() if value}
    other = "parameters" in given and (run is None or given["parameters"] != run.parameters)
    if other and "grad_s" not in given:
        got = f"--parameters {asked.parameters} without --step-time"
        remedy = "a gradient of another model cannot be timed here: give its time, such as 300ms"
        raise UserError(got, "--step-time TIME", remedy)
    if run is not None and record is not None:
        rows = model.table_bytes_of(record.summary, config), model.tables_of(record.summary, config)
        measured = Measured(run.parameters, run.samples, 0.0, 0.0, *rows)
    elif len(given) == 3:
        own = ":" in config.problem  # a user's problem, whose tables are unknown
        measured = Measured(0, 0, 0, 0, 0, None if own or config.problem in SPARSE_PROBLEMS else ())
    else:
        measured = measure(config)
    measured = dataclasses.replace(measured, **given)
    mpi = asked.mpi or (model.mpi_of(record.summary) if record is not None else MPICH)
    speeds = Speeds(
        measured.grad_s, asked.jitter, asked.slow_workers, link=PAYLOAD * rate(asked.link),
        latency_s=seconds(asked.latency), storage=rate(asked.storage),
        batch_bytes=config.batch_size * quantity(asked.sample_bytes, BYTES),
        rounds=ROUND_COSTS[mpi],
    )  # fmt: skip
    if record is not None:
        of_run = model.speeds_of(record.summary, config, speeds, start_s)
        speeds = dataclasses.replace(of_run, step_s=measured.grad_s or of_run.step_s)
    codecs = _codecs(config, measured.parameters, bool(asked.parameters))
    stops = seconds(asked.mtbf), seconds(asked.restart)
    return Facts(measured, speeds, *stops, codecs, asked.simulate)


def _codecs(config: Config, parameters: int, given: bool) -> dict[str, float]:
    """Return the ratio of bytes on the wire to bytes in memory, by codec."""
    ratios = codec_ratios(parameters, config.dtype)
    if config.codec == "powersgd":
        if given:
            got = "--codec powersgd with --parameters"
            raise UserError(got, "the shapes of a model's arrays", "leave out --parameters")
        layout = load_problem(config.problem, open_dataset(config).info, config).layout
        factors = Factors.of(layout, config.dtype, config.powersgd_rank)
        ratios["powersgd"] = factors.sent / layout.size
    return ratios


def _world(known: _Known) -> World:
    c, asked = known.config, known.asked
    if known.own_world and known.run is not None:
        hosts, node_of = list(known.run.hosts), list(known.run.node_of)
        if c.node_size:  # as in a run, no node has ranks of two hosts
            parts = [(host, rank // c.node_size) for rank, host in enumerate(hosts)]
            numbers = {part: number for number, part in enumerate(dict.fromkeys(parts))}
            node_of = [numbers[part] for part in parts]
        return hosts, node_of
    ranks = asked.workers + _servers(c, asked.workers) + c.spares
    return spread(ranks, asked.nodes, c.node_size)


def _servers(config: Config, workers: int) -> int:
    """Return the number of servers of a job with this number of workers."""
    servers = len(config.server_ranks) or config.servers
    if servers is not None:
        return servers
    counts = range(workers + 1)  # the count that is the default in a world of workers + count
    return next(k for k in counts if default_servers(config.mode, workers + k) == k)


def _searched(known: _Known, as_json: bool) -> str:
    asked = known.asked
    if steps := known.config.steps:
        remedy = "they are each worker's, so that fewer workers train on fewer samples"
        raise UserError(f"--search with steps {steps}", "--epochs", remedy)
    workers = asked.workers or (known.run.workers if known.run else 0)
    ranks = len(_world(known)[1])
    size = known.config.node_size or (-(-ranks // asked.nodes) if asked.nodes else 1)
    deadline_s = seconds(asked.deadline)
    result = search(known.config, workers, lambda n: spread(n, 0, size), known.facts, deadline_s)
    assumed = {k: v for k, v in known.assumed.items() if k != "servers"}  # the search chooses them
    if not as_json:
        return proposal_text(result, deadline_s, assumed)
    fields = {
        "looked_at": result.looked_at,
        "best": result.best and {**told(result.best), "why": "cheapest"},
        "fastest": told(result.fastest),
        "others": [{**told(p), "why": why} for p, why in result.others],
        "assumed": assumed,
    }
    return json.dumps(fields, indent=1) + "\n"


def main(argv: Sequence[str]) -> int:
    """Print the plan, and return the exit code."""
    return answer(write, argv)
