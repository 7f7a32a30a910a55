"""Output of a run at its start and end, and ``summary.json``.

Messages:
    nothing is left to do: The run is over: ``--epochs`` or ``--steps`` with more continues.
"""

import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from mpips import __version__
from mpips.checkpoint.run_folder import BEST
from mpips.config.delay import delays_text
from mpips.datasets.csr import IDS, Seen
from mpips.errors import human_bytes
from mpips.launch import heartbeat
from mpips.layout import fragment_shards
from mpips.mpi.start import mpi_name
from mpips.mpi.world import Cluster
from mpips.planning.job import Job
from mpips.planning.outcome import Outcome
from mpips.planning.tables import tables_of
from mpips.session import metrics
from mpips.session.metrics import Log
from mpips.snapshot import worker_state
from mpips.transport import wire


def say_failure_policy(job: Job, log: Log) -> None:
    """Print on the coordinator what happens if a rank dies, unless MPI simply ends the job."""
    if not job.cluster.is_coordinator:
        return
    if job.cluster.failures.on or job.config.spares or heartbeat.terms() is not None:
        from mpips.failover.policy import announcement

        log.say(announcement(job))


def say_start(job: Job, notes: Sequence[str], log: Log) -> None:
    """Print on the coordinator the job, its roles, and the checkpoint that it continues.

    Args:
        job: The run.
        notes: Notes about its folder.
        log: Log of the run.
    """
    if not job.cluster.is_coordinator:
        return
    ranks, c = job.cluster, job.config
    item = job.dtype.itemsize * (1 + len(job.slots))
    owned = dict(zip(ranks.roles.owners, (s.size * item for s in job.shards), strict=True))
    sizes = [owned.get(r, 0) for r in range(ranks.world)]
    names = [ranks.roles.name(r) for r in range(ranks.world)]
    log.say(f"mpips {__version__}: {c.problem} on {job.info.name}, mode {c.mode}, {c.optimizer}")
    log.say(f"{job.layout.size:,} parameters, {job.info.n_train:,} samples, run in {job.out}")
    for table in tables_of(job):
        shape = f"{table.table.rows:,} rows of {table.dim}{', lazy' * table.table.lazy}"
        log.say(f"table {table.name}: {shape}, {table.rule.name} at {table.rule.rate:g}")
    log.say(metrics.role_table(ranks.hosts, ranks.node_of, names, sizes))
    if c.evaluators:
        first, last = ranks.world, ranks.world + c.evaluators - 1
        which = f"rank {first} evaluates" if first == last else f"ranks {first} to {last} evaluate"
        log.say(f"{which} a checkpoint every {c.eval_every:g} epochs")
    for note in (*notes, *job.info.notes):
        log.say(note)
    asked, held = job.samples_per_update, job.info.n_train
    if asked > held:
        log.say(
            f"each update takes a whole epoch: {asked:,} samples are asked for, it has {held:,}"
        )
    if job.checkpoint:
        _say_resumed(job, log)
    if c.delays:
        log.say(f"slowed: {delays_text(c.delays)}")
    log.event(
        "start", job.base_step, mode=c.mode, world=ranks.world + c.evaluators,
        epochs=None if c.steps else c.epochs, resumed=bool(job.checkpoint),
        inject_delay=c.delays, data=job.info.notes,
    )  # fmt: skip
    for note in notes:
        log.note(note)


def _say_resumed(job: Job, log: Log) -> None:
    assert job.checkpoint is not None
    log.say(f"resumed at step {job.base_step} from {job.checkpoint.path}")
    if job.config.in_rounds:
        changed = "; ".join(job.differences())
        held = f"does not hold ({changed})" if changed else "holds"
        log.say(f"bitwise equality with an uninterrupted run {held}")
    allocator = job.allocator()
    if all(allocator.next(taker) is None for taker in range(allocator.workers)):
        length = "steps" if job.config.steps else "epochs"
        asked = getattr(job.config, length)
        log.say(f"nothing is left to do: {asked} {length} are over, and no more are asked for")


def say_left_out(job: Job, log: Log) -> None:
    """Print the names of saved vectors of workers that a resumed run does not use.

    Args:
        job: The run, with chosen codecs.
        log: Log of the run.
    """
    if job.checkpoint is None:
        return
    read = {*worker_state.names(job), *job.own_slots, *job.slots}
    lost = [name for name in job.checkpoint.worker_names if name not in read]
    if lost:
        log.say(f"{', '.join(lost)} is left out: this run has none")


PULLED, PUSHED = "rows_pulled", "rows_pushed"
ROWS_DONE = ("pulled", "pushed", "again", "torn", "ahead")  # sums over all workers, for each table
SHOWN = 8  # number of servers shown
PER_SERVER = (
    *("bytes", "applied", "busy_s", "lost"),
    *("statistics_from", "taken_over_in_s", "taken_over_by"),
)
Means: TypeAlias = Mapping[str, float]
# A worker that has died has only `lost` and its steps.
PER_WORKER = (
    *("steps", "samples", "compute_s", "pull_s", "push_s", "wait_s", "lost"),
    *("bytes_sent", "bytes_received"),
)


def summarise(
    job: Job, outcome: Outcome, parts: list[dict[str, Any]], held_out: Means, train_s: float
) -> dict[str, Any]:
    """Return the contents of ``summary.json``.

    Args:
        job: The run.
        outcome: End of the run.
        parts: Every rank's part, by rank.
        held_out: Mean of each metric at the end, if the run is complete.
        train_s: Seconds of training.
    """
    c, ranks = job.config, job.cluster
    workers = [parts[r] for r in ranks.roles.workers]
    owners = [parts[r] for r in ranks.roles.owners]
    done = outcome.samples - job.base_samples
    given_up = job.evaluations.link.given_up if job.evaluations is not None else ()
    return {
        "mode": c.mode, "world": ranks.world + c.evaluators,
        "servers": len(ranks.roles.servers) - ranks.roles.spares, "workers": len(workers),
        "evaluators": c.evaluators, "nodes": _nodes(ranks), "parameters": job.layout.size,
        "optimizer": c.optimizer, "lr": c.learning_rate, "seed": c.seed, "command": command(),
        "codec": c.codec, "pull_codec": c.pull_codec,
        "global_step": outcome.step, "steps": outcome.clocks, "epochs": round(outcome.epochs, 6),
        "samples": outcome.samples, "wall_s": round(time.perf_counter() - job.started, 3),
        "train_s": round(train_s, 3), "samples_per_s": round(done / train_s, 1),
        "loss": None, "eval_loss": held_out.get("loss"), "accuracy": held_out.get("accuracy"),
        **_standing(job),
        "pushes_sent": sum(w["pushes_sent"] for w in workers),
        "pushes_applied": max(o["applied"] for o in owners) if not c.in_rounds
        else sum(w["pushes_sent"] for w in workers),
        "staleness": _staleness(owners, c.in_rounds),
        "clock_distance_max": max(part.get("clock_distance_max", 0) for part in (*workers, *owners))
        if c.mode in ("ssp", "hybrid") else None,
        **{k: _sum(workers, k) for k in ("torn_reads", "bytes_pulled", "bytes_pushed")},
        "tables": _tables(job, workers, owners), "hashed": _hashed(workers),
        **{k: _sum(parts, k) for k in ("bytes_sent", "bytes_received")},
        "per_worker": [{"rank": r, **_known(parts[r], PER_WORKER)} for r in ranks.roles.workers],
        "per_server": [
            _server(parts[r], r, _row_load(workers, k)) for k, r in enumerate(ranks.roles.owners)
        ],
        "inject_delay": c.delays,
        "peak_memory_mb": [part.get("peak_memory_mb") for part in parts],
        "lost": sorted({*outcome.lost, *outcome.taken_over, *given_up}),
        "stop_reason": outcome.reason, "unsaved": outcome.unsaved or None,
        "resumed_from": str(job.checkpoint.path) if job.checkpoint else None,
        "mpi": mpi_name(), "version": __version__,
    }  # fmt: skip


def _tables(
    job: Job, workers: list[dict[str, Any]], owners: list[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the counts of each table: rows pulled, pushed and changed."""
    found, tables = {}, tables_of(job)
    if tables:
        from mpips.tables.load import hot_rows
    for table in tables:
        counts_of = [worker["tables"][table.name] for worker in workers if "tables" in worker]
        changed = [owner["rows_changed"][table.name] for owner in owners]
        found[table.name] = {
            "rows": table.table.rows, "dim": table.dim, "changed": sum(changed),
            **{name: sum(each[name] for each in counts_of) for name in ROWS_DONE},
            "hot": hot_rows([each["load"] for each in counts_of]), "hashed": None, "evicted": None,
        }  # fmt: skip
        if table.table.evict_after is not None:
            evicted = [owner.get("rows_evicted", {}).get(table.name, 0) for owner in owners]
            found[table.name]["evicted"] = sum(evicted)
        if table.table.hashed:
            counts = _hashed(counts_of) or {"ids": 0, "shared": 0}
            found[table.name]["hashed"] = {"of": Seen(table.table.rows).of, **counts}
    return found


def _hashed(workers: list[dict[str, Any]]) -> dict[str, int] | None:
    """Return the number of ids in hashed columns, and of ids that several values share.

    For a table with hashed ids, workers give counts of its rows.
    """
    known = [bits for worker in workers if (bits := worker.get("hashed")) is not None]
    if not known:
        return None
    ids, shared = np.unpackbits(np.bitwise_or.reduce(known), axis=1).sum(axis=1, dtype=int).tolist()
    return {"ids": ids, "shared": shared}


def _row_load(workers: list[dict[str, Any]], server: int) -> dict[str, dict[str, int]]:
    """Return the number of rows that workers have read from a server and pushed to it, by table."""
    does = [worker["tables"] for worker in workers if worker.get("tables")]
    if not does:
        return {}
    from mpips.tables.load import rows_by_server

    return {
        kind: {
            table: rows_by_server([each[table]["load"] for each in does], kind)[server]
            for table in does[0]
        }
        for kind in (PULLED, PUSHED)
    }


def _table_lines(summary: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each table: its counts, its load by server, and the rows pushed most."""
    for name, table in summary["tables"].items():
        line = f"table {name}: pulled {table['pulled']:,} rows, pushed {table['pushed']:,}"
        pushed = [server[PUSHED][name] for server in summary["per_server"]]
        if len(pushed) > 1:
            shares = ", ".join(f"{share / max(1, sum(pushed)):.0%}" for share in pushed[:SHOWN])
            line += f"; by server {shares}{', ...' if len(pushed) > SHOWN else ''}"
        hot = [f"{each['row']} ({each['share']:.1%})" for each in table["hot"][:3]]
        line += f"; most pushed {', '.join(hot)}" if hot else ""
        if (ids := table["hashed"]) is not None:
            line += f"; of {ids['of']:,} rows {ids['ids']:,} have ids, {ids['shared']:,} several"
        yield line


def _sum(parts: list[dict[str, Any]], name: str) -> Any:
    """Return the sum over the parts that have the value; parts of dead ranks may lack it."""
    return sum(part.get(name, 0) for part in parts)


def _nodes(ranks: Cluster) -> list[dict[str, Any]]:
    members: list[list[int]] = [[] for _ in range(ranks.nodes)]
    for rank, node in enumerate(ranks.node_of):
        members[node].append(rank)
    return [{"host": ranks.hosts[on_node[-1]], "ranks": on_node} for on_node in members]


def _where(job: Job, reason: str, unsaved: str | None) -> str:
    if unsaved:
        return f"not saved: {unsaved}"
    if reason == "diverged":
        return "not saved: it diverged"
    if reason.startswith("SIG"):
        by_supervisor = heartbeat.terms() is not None  # the supervisor prints the next step
        onward = "" if by_supervisor else f": go on with --out {job.out} --resume"
        return f"saved and not finished{onward}"
    return f"saved in {job.out}"


def _known(part: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: part[name] for name in names if name in part}


def _standing(job: Job) -> dict[str, Any]:
    """Return step and loss of the best evaluation; None without evaluators."""
    if job.evaluations is None:
        return {"best_step": None, "best_loss": None}
    best = job.evaluations.standing
    loss = best.best_loss if best.best_step is not None else None
    return {"best_step": best.best_step, "best_loss": loss}


def _server(part: dict[str, Any], rank: int, load: dict[str, Any]) -> dict[str, Any]:
    stale = part.get("staleness_sum", 0) / max(1, part["applied"])
    changed = ["rows_changed"] if part.get("rows_changed") else []
    found = {"rank": rank, **_known(part, [*PER_SERVER, *changed]), **load}
    return {**found, "pushes_dropped": part.get("pushes_dropped", 0), "staleness_mean": stale}


def _staleness(owners: list[dict[str, Any]], in_rounds: bool) -> dict[str, Any]:
    """Return the staleness over all shards; a synchronous update is never stale."""
    if in_rounds:
        return metrics.staleness_summary([sum(o["applied"] for o in owners)], 0, 0)
    bins = [sum(column) for column in zip(*(o["staleness"] for o in owners), strict=True)]
    total = sum(o["staleness_sum"] for o in owners)
    return metrics.staleness_summary(bins, total, max(o["staleness_max"] for o in owners))


def _crossed(job: Job, summary: dict[str, Any]) -> Iterator[str]:
    """Yield the line about traffic between nodes, if there is more than one."""
    if len(summary["nodes"]) == 1:
        return
    sent, received = (human_bytes(summary[f"bytes_{way}"]) for way in ("sent", "received"))
    names = " and ".join(sorted(_packed_by(job)))
    packed = f", packed by {names}" if names else ""
    yield f"workers sent {sent} to other nodes and had {received} from them{packed}"


def _packed_by(job: Job) -> set[str]:
    """Return the names of the codecs that packed shards, or may have packed rows."""
    c, shards = job.config, job.shards
    if tables_of(job) and not c.in_rounds:
        return {c.codec, c.pull_codec} - {"none"}
    if c.streaming:
        shards = tuple(fragment_shards(shards, c.fragments, job.dtype.itemsize)[0])
    return wire.packed_by(job, shards)


def _lost(summary: dict[str, Any]) -> Iterator[str]:
    """Yield the lines about ranks that have died, if any has."""
    if not summary["lost"]:
        return
    yield f"went on without ranks that died: {', '.join(map(str, summary['lost']))}"
    for number, server in enumerate(summary["per_server"]):
        if "taken_over_by" in server:
            took, since = f"{server['taken_over_in_s']:.3f} s", server["statistics_from"]
            yield (
                f"server {server['taken_over_by']} took over the shard of server {number} in "
                f"{took}; its figures are of the time from its update {since} on"
            )


def _special(job: Job, summary: dict[str, Any]) -> Iterator[str]:
    """Yield the lines about evaluations, clocks in mode ssp, dropped pushes and hashed columns."""
    c, best = job.config, summary["best_step"]
    if (found := summary["clock_distance_max"]) is not None:
        what = "largest clock distance of a read"
        if c.mode == "hybrid":
            what = "most rounds whose rows a read lacked"
        yield f"{what} {found}, staleness bound {c.bound}"
    if c.max_staleness is not None or c.backup_workers:
        each = ", ".join(f"{o['pushes_dropped']} of {o['applied']}" for o in summary["per_server"])
        limit = "their round" if c.backup_workers else f"{c.max_staleness} updates"
        yield f"pushes dropped, older than {limit}: {each}"
    if best is not None:
        where = f": {job.out / BEST}" if c.keep_best else ""
        yield f"lowest held-out loss {summary['best_loss']:.4f} at step {best}{where}"
    if (ids := summary["hashed"]) is not None:
        shared = f"{ids['shared']:,} of them stand for two values or more"
        yield f"hashed columns: {ids['ids']:,} of {IDS:,} ids read, {shared}"


def command() -> str:
    """Return the command line that started this rank: of `mpips.train`, or of a program."""
    module, (program, *options) = sys.modules["__main__"].__spec__, sys.argv
    words = ["-m", "mpips.train"]
    if module is None and program.endswith(".py"):
        words = [program]
    elif module is not None and not module.name.startswith("mpips."):
        words = ["-m", module.name.removesuffix(".__main__")]
    return shlex.join(["python", *words, *options])


def summary_text(job: Job, summary: dict[str, Any]) -> str:
    """Return the summary in a few lines."""
    s = summary
    accuracy = "" if s["accuracy"] is None else f", accuracy {100 * s['accuracy']:.2f} %"
    loss = "" if s["eval_loss"] is None else f"held-out loss {s['eval_loss']:.4f}{accuracy}; "
    stale = s["staleness"]
    times = {k: _sum(s["per_worker"], k) for k in ("compute_s", "pull_s", "push_s", "wait_s")}
    whole = sum(times.values()) or 1.0
    where = ", ".join(f"{k[:-2]} {100 * v / whole:.0f} %" for k, v in times.items())
    moved = human_bytes(s["bytes_pulled"]), human_bytes(s["bytes_pushed"])
    load = ", ".join(f"{o['busy_s']:.1f}" for o in s["per_server"])
    spent = f"{s['train_s']:.1f} s of {s['wall_s']:.1f} s"
    slowed = f"; slowed: {delays_text(s['inject_delay'])}" if s["inject_delay"] else ""
    return "\n".join(
        [
            f"ended: {s['stop_reason']} at step {s['global_step']}, epoch {s['epochs']:.2f}",
            f"{loss}{s['samples_per_s']:,.0f} samples/s, {spent}",
            f"staleness mean {stale['mean']:.2f}, p99 {stale['p99']}, max {stale['max']}; "
            f"torn reads {s['torn_reads']}; pulled {moved[0]}, pushed {moved[1]}",
            *_crossed(job, s),
            *_lost(s),
            *_table_lines(s),
            *_special(job, s),
            f"workers' time: {where}; owners busy for {load} s{slowed}",
            _where(job, s["stop_reason"], s["unsaved"]),
        ]
    )
