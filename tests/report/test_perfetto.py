"""Timelines of runs, read by Perfetto's own parser and asked about by SQL."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from launch import run
from perfetto import Perfetto, engine

from mpips import trace

pytestmark = [pytest.mark.long, pytest.mark.launch, pytest.mark.one_mpi]
ROUNDING_NS = 2
SLICES = """
select thread.name, slice.name, slice.ts, slice.dur
from slice join thread_track on slice.track_id = thread_track.id join thread using (utid)
"""
FLOWS = """
select begun.name, began.name, begun.ts, ended.name, ends.name, ended.ts
from flow join slice begun on slice_out = begun.id join slice ended on slice_in = ended.id
join thread_track t on begun.track_id = t.id join thread began using (utid)
join thread_track u on ended.track_id = u.id join thread ends on u.utid = ends.utid
"""
WAITS = """
select slice.name, string_value from slice join args using (arg_set_id) where key = 'args.for'
"""
Event = dict[str, Any]


def events_of(folder: Path) -> list[Event]:
    """Write the timeline of a run; returns its events."""
    trace.make([str(folder)])
    events: list[Event] = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return events


def check_read(events: list[Event], found: Perfetto) -> None:
    """Check that Perfetto has every slice, rank, node and mark of a timeline, and no complaint."""
    problems = "select name, value from stats where severity != 'info' and value > 0"
    assert found.query(problems) == []
    of_kind = {kind: [e for e in events if e["ph"] == kind] for kind in "XMib"}
    names = {e["tid"]: e["args"]["name"] for e in of_kind["M"] if e["name"] == "thread_name"}
    start = min(e["ts"] for e in events if "ts" in e)
    slices = sorted(found.query(SLICES))
    kept = sorted(
        (names[e["tid"]], e["name"], round(1e3 * (e["ts"] - start)), round(1e3 * e["dur"]))
        for e in of_kind["X"]
    )
    assert len(slices) == len(kept) > 100
    first = min(ts for _, _, ts, _ in slices)
    for (rank, name, ts, dur), wanted in zip(slices, kept, strict=True):
        assert (rank, name) == wanted[:2]
        assert abs(ts - first - wanted[2]) <= ROUNDING_NS
        assert abs(dur - wanted[3]) <= ROUNDING_NS
    nodes = {e["args"]["name"] for e in of_kind["M"] if e["name"] == "process_name"}
    assert nodes <= {name for (name,) in found.query("select name from process")}
    others = Counter(e["name"] for e in of_kind["i"] + of_kind["b"])
    marks = (
        "select name, count(*) from slice where name like '%checkpoint %' or name like 'writing %'"
    )
    assert dict(found.query(f"{marks} group by name")) == others


def test_a_run_with_servers_on_two_nodes(tmp_path: Path, browser: str) -> None:
    """An arrow from each push to each server, and the evaluator's lane."""
    options = ["--servers", "2", "--node-size", "2", "--evaluators", "1", "--eval-every", "1"]
    options += ["--far-read", "reply"]
    words = [*options, "--hidden", "64", "--trace", "--epochs", "2", "--quiet", "--out", "run"]
    run(5, ["-m", "mpips.train", *words], tmp_path).check()
    events = events_of(tmp_path / "run")
    with engine(browser, tmp_path) as found:
        found.load((tmp_path / "run" / "trace.json").read_bytes())
        check_read(events, found)
        flows = found.query(FLOWS)
        lanes = Counter(name for rank, name, *_ in found.query(SLICES) if "evaluator 0" in rank)
    assert len(flows) == sum(e["ph"] == "f" for e in events) > 100
    assert all(flow[0] == "pushing" for flow in flows if flow[3] == "applying")
    assert {flow[3] for flow in flows} == {"applying", "answering a read"}
    reads = {(flow[1], flow[4]) for flow in flows if flow[3] == "answering a read"}
    assert reads == {
        ("rank 1: worker 0", "rank 2: server 1"), ("rank 3: worker 1", "rank 0: server 0")
    }  # fmt: skip
    assert {flow[1] for flow in flows} == {"rank 1: worker 0", "rank 3: worker 1"}
    assert {flow[4] for flow in flows} == {"rank 0: server 0", "rank 2: server 1"}
    assert all(begins <= ends for _, _, begins, _, _, ends in flows)
    assert lanes["evaluating"] >= 1
    assert lanes["reading a checkpoint"] == lanes["evaluating"]


def test_a_run_of_rounds(tmp_path: Path, browser: str) -> None:
    words = ["--mode", "sync", "--hidden", "64", "--trace", "--epochs", "2", "--quiet"]
    run(4, ["-m", "mpips.train", *words, "--out", "run"], tmp_path).check()
    events = events_of(tmp_path / "run")
    with engine(browser, tmp_path) as found:
        found.load((tmp_path / "run" / "trace.json").read_bytes())
        check_read(events, found)
        flows = found.query(FLOWS)
        whats = Counter(name for _, name, *_ in found.query(SLICES))
        waits = found.query(WAITS)
    assert whats["in a round"] > 0
    assert len(flows) == sum(e["ph"] == "f" for e in events) > whats["in a round"] / 20
    assert all(began != ends and begins <= on for _, began, begins, _, ends, on in flows)
    ends = {"in a round", "waits for the round", "between steps"}
    assert {"in a round"} <= {flow[3] for flow in flows} <= ends
    assert len(waits) == sum("for" in e.get("args", ()) for e in events) > len(flows) / 2
    assert {awaited for _, awaited in waits} <= {name for _, name, *_ in flows}
    assert {name for name, _ in waits} <= {"in a round", "waits for the round"}
