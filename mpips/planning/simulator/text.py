"""Predictions as people read them."""

from collections.abc import Sequence

from mpips.errors import human_bytes
from mpips.planning.simulator.asked import shown_time
from mpips.planning.simulator.measured import Run
from mpips.planning.simulator.prediction import Prediction, nodes_text
from mpips.planning.simulator.search import Proposal


def text_of(p: Prediction, run: Run | None = None) -> str:
    """Return a prediction as it is printed; beside what a run did, where that is its world."""
    roles, c = p.case.roles, p.config
    item, on = p.case.vector // max(1, sum(p.case.shards)), f"{p.case.nodes} nodes"
    del item
    lines = [
        f"mode {c.mode}: {len(roles.servers)} servers and {len(roles.workers)} workers on "
        f"{'one node' if p.case.nodes == 1 else on}, {human_bytes(p.case.vector)} of parameters, "
        f"codec {c.codec}, of pulls {c.pull_codec}",
        f"a step takes {shown_time(p.found.step_s)}, at least {shown_time(p.formula_s)} by formula: "
        f"{p.samples_per_s:,.0f} samples/s",
        *_bottleneck(p),
        *_stale(p),
        *_memory(p),
        *_end(p),
        f"{p.core_hours:,.1f} core hours: {p.ranks} ranks of {p.cores} "
        f"core{'s' * (p.cores > 1)}",
        f"simulated: {p.found.steps:,} steps, {p.found.events:,} events, "
        f"{p.found.took_s:.2g} s",
        *(_beside(p, run) if run is not None else []),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


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


def _end(p: Prediction) -> list[str]:
    life, c = p.lifetime, p.config
    what = f"{c.steps:,} steps" if c.steps else f"{c.epochs} epochs"
    line = f"time to the end of {what}: {shown_time(life.mean_s)}"
    if not life.failures:
        return [line]
    return [
        f"{line}, in nine cases of ten at most {shown_time(life.p90_s)}",
        f"of it {life.failures:.3g} failures, which undo {shown_time(life.lost_s)}; training "
        f"stands still for checkpoints for {shown_time(life.saving_s)}",
    ]


def _beside(p: Prediction, run: Run) -> list[str]:
    """Return the rows of a run beside its prediction."""
    rows = [("step", 1e3 * run.step_s, 1e3 * p.found.step_s, "ms")]
    if run.staleness is not None:
        rows.append(("mean staleness", run.staleness, p.found.stale()["mean"], ""))
    lines = ["the run itself:    measured  predicted"]
    for name, measured, predicted, unit in rows:
        off = f"{predicted / measured - 1:+.0%}" if measured else ""
        lines.append(f"  {name:15s}  {measured:9.4g}  {predicted:9.4g}  {unit:2s} {off:>5s}")
    return lines


def proposal_text(proposal: Proposal, deadline_s: float) -> str:
    """Return the outcome of a search as it is printed."""
    best = proposal.best
    if best is None:
        fastest = proposal.fastest
        return (
            f"none of {proposal.looked_at} configurations is over within "
            f"{shown_time(deadline_s)}; the fastest takes {shown_time(fastest.lifetime.mean_s)}: "
            f"{proposal.options(fastest)}; its bottleneck: {fastest.bottleneck[0]}\n"
        )
    lines = [
        f"cheapest of {proposal.looked_at} configurations: {proposal.options(best)}",
        "", text_of(best).rstrip(), "",
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
