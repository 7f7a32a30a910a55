"""Predictions as text."""

from collections.abc import Mapping, Sequence
from textwrap import wrap

from mpips.config.option import HELP_WIDTH
from mpips.errors import counted, human_bytes
from mpips.planning.simulator.asked import shown_time
from mpips.planning.simulator.model import Run
from mpips.planning.simulator.prediction import Prediction, nodes_text
from mpips.planning.simulator.search import Proposal

GLUE = "\0"  # a space at which no line breaks


def text_of(p: Prediction, assumed: Mapping[str, str], run: Run | None = None) -> str:
    """Return a prediction as printed.

    Args:
        p: The prediction.
        assumed: Values that were assumed, as they were not given.
        run: Measured run to compare with, if its ranks are used; else None.
    """
    roles, c = p.case.roles, p.config
    where = "one node" if p.case.nodes == 1 else f"{p.case.nodes} nodes"
    servers = f"{counted(len(roles.servers), 'server')} and " if roles.servers else ""
    lines = [
        f"mode {c.mode}: {servers}{counted(len(roles.workers), 'worker')} on {where}, "
        f"{human_bytes(p.case.vector)} of parameters, codec {c.codec}, of pulls {c.pull_codec}",
        f"a step takes {shown_time(p.found.step_s)}, by formula at least "
        f"{shown_time(p.formula_s)}: {p.samples_per_s:,.0f} samples/s",
        *_rows_of_tables(p),
        *_bottleneck(p),
        *_stale(p),
        *_memory(p),
        *_end(p),
        f"{p.core_hours:,.1f} core hours: {counted(p.ranks, 'rank')} of {counted(p.cores, 'core')}",
        f"simulated: {p.found.steps:,} steps, {p.found.events:,} events, "
        f"{p.found.took_s:.2g} s",
        *_assumed(assumed),
        *(_beside(p, run) if run is not None else []),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _rows_of_tables(p: Prediction) -> list[str]:
    if p.without_rows:
        return ["rows of tables, if any, are not counted: how many a batch needs is not known"]
    pulled, pushed = (human_bytes(n) for n in (p.case.rows.params, p.case.rows.grads))
    if not p.case.rows.params:
        return []
    return [f"rows of tables: a batch reads {pulled} and pushes {pushed}, all servers together"]


def _bottleneck(p: Prediction) -> list[str]:
    name, share = p.bottleneck
    lines = [f"bottleneck: {name} ({share:.0%} of the time)"]
    if p.found.links:
        lines.append("  links of                                    send  receive")
        lines += [
            f"  {nodes_text(busy):40s}  {busy.sends:6.0%}  {busy.receives:7.0%}"
            for busy in p.found.links
        ]
    where = ", ".join(f"{name} {part:.0%}" for name, part in p.found.parts.items())
    lines.append(f"workers' time: {where}; servers apply for {p.found.applying:.0%} of it")
    if p.found.storage:
        lines.append(f"storage is read from for {p.found.storage:.0%} of the time")
    return lines


def _stale(p: Prediction) -> list[str]:
    if p.config.backup_workers:
        return [f"gradients that come too late for their round: {p.found.dropped:.1%}"]
    if p.case.rounds:
        return ["no update is stale"]
    s = p.found.stale()
    return [
        f"staleness mean {s['mean']:.3g}, median {s['p50']:.0f}, p90 {s['p90']:.0f}, "
        f"p99 {s['p99']:.0f}, max {s['max']:.0f}"
    ]


def _memory(p: Prediction) -> list[str]:
    server = f"{human_bytes(p.needs.server_bytes)} of a server, " if p.needs.server_bytes else ""
    return [f"memory: {server}{human_bytes(p.needs.worker_bytes)} of a worker"]


def _assumed(assumed: Mapping[str, str]) -> list[str]:
    """Return lines with the assumed values; no line breaks within a value."""
    words = ", ".join(f"{name} {value}".replace(" ", GLUE) for name, value in assumed.items())
    lines = wrap(f"assumed: {words}", HELP_WIDTH, subsequent_indent="  ") if words else []
    return [line.replace(GLUE, " ") for line in lines]


def _end(p: Prediction) -> list[str]:
    life, c = p.lifetime, p.config
    what = counted(c.steps, "step") if c.steps else counted(c.epochs, "epoch")
    start = f"start-up: {shown_time(life.start_s)}"
    line = f"time to the end of {what}: {shown_time(life.mean_s)}, start-up included"
    if not life.failures:
        return [start, line]
    return [
        start,
        f"{line}, in nine cases of ten at most {shown_time(life.p90_s)}",
        f"failures of nodes: {life.failures:.3g}, which undo {shown_time(life.lost_s)} of "
        f"training; checkpoints hold it up for {shown_time(life.saving_s)}",
    ]


def _beside(p: Prediction, run: Run) -> list[str]:
    """Return the measurements of a run beside its prediction."""
    rows = [("step", 1e3 * run.step_s, 1e3 * p.found.step_s, "ms")]
    if run.staleness is not None:
        rows.append(("mean staleness", run.staleness, p.found.stale()["mean"], ""))
    lines = ["the run itself:    measured  predicted"]
    for name, measured, predicted, unit in rows:
        off = f"{predicted / measured - 1:+.0%}" if measured else ""
        lines.append(f"  {name:15s}  {measured:9.4g}  {predicted:9.4g}  {unit:2s} {off:>5s}")
    return lines


def comparison(rows: Sequence[tuple[str, Prediction, Run]], link: str) -> str:
    """Return a table in Markdown that compares measured and predicted runs.

    Args:
        rows: Name, prediction and run.
        link: Rate of the links, as the user gave it.
    """
    lines = [
        "| run | link | world | step, ms | predicted | | mean staleness | predicted | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, p, run in rows:
        servers, workers = len(p.case.roles.servers), len(p.case.roles.workers)
        cells = [name, link, f"{p.case.nodes} nodes, {servers} + {workers} ranks"]
        cells += _cells(1e3 * run.step_s, 1e3 * p.found.step_s)
        stale = run.staleness
        cells += ["", "", ""] if stale is None else _cells(stale, p.found.stale()["mean"])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cells(measured: float, predicted: float) -> list[str]:
    off = f"{100 * (predicted / measured - 1):+.0f} %" if measured else ""
    return [f"{measured:.3g}", f"{predicted:.3g}", off]


def proposal_text(proposal: Proposal, deadline_s: float, assumed: Mapping[str, str]) -> str:
    """Return the result of a search as printed; see `text_of`."""
    best = proposal.best
    if best is None:
        fastest = proposal.fastest
        return (
            f"none of {proposal.looked_at} configurations is over within "
            f"{shown_time(deadline_s)}; the fastest takes {shown_time(fastest.lifetime.mean_s)}: "
            f"{proposal.options(fastest)}; its bottleneck: {fastest.bottleneck[0]}\n"
            + "".join(f"{line}\n" for line in _assumed(assumed))
        )
    lines = [
        f"cheapest of {proposal.looked_at} configurations: {proposal.options(best)}",
        "", text_of(best, assumed).rstrip(), "",
        "why not another (of the same samples; what a mode does to the result is not counted):",
        *_rows(proposal, proposal.others),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _rows(proposal: Proposal, others: Sequence[tuple[Prediction, str]]) -> list[str]:
    names = [proposal.options(p) for p, _ in others]
    width = max(map(len, names), default=0)
    return [
        f"  {name:{width}s}  {shown_time(p.lifetime.mean_s):>12s}  {p.core_hours:10,.1f} core h  "
        f"{why}"
        for name, (p, why) in zip(names, others, strict=True)
    ]
