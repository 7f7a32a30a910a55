"""A store put together without a job: what it holds, and that it is freed once."""

import sys
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from verdict import check
from walks import FEATURES

import mpips
from mpips.config.command_line import parse_command_line
from mpips.layout import cut
from mpips.layout.roles import assign
from mpips.mpi.world import Cluster
from mpips.optim import make_rule
from mpips.ps.assemble import ServerHalf, WorkerHalf, assemble
from mpips.ps.design import Design
from mpips.session import run as session

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.world(max_size=4)]

N = 1003


def serve(cluster: Cluster, half: ServerHalf, enough: set[int]) -> None:
    """Apply what is here and answer reads; notes who has seen enough."""
    push = half.receiver.take()
    if push is not None:
        half.server.apply(push)
    half.server.serve_reads()
    for source, kind, payload in cluster.poll():
        if kind == "read":
            half.server.want_read(source, payload)
        else:
            enough.add(source)
    cluster.progress()


def work(cluster: Cluster, half: WorkerHalf) -> list[object]:
    """Push once, pull until every push is there, and once more when nobody serves."""
    workers = cluster.roles.workers
    half.sender.buffer(1)[:] = cluster.rank
    half.sender.push((0, 0, 1), 1, 0.0, half.puller.versions)
    cluster.wait(half.sender.sent)
    out, last = np.zeros(N), np.zeros(N)
    while half.puller.pull(out).min() < len(workers):
        pass
    for rank in cluster.roles.servers:
        cluster.send(rank, "enough")
    cluster.barrier()
    versions = half.pull_final(last)
    expected = 1.0 + sum(workers)
    if not (last == expected).all() or versions.tolist() != half.puller.versions.tolist():
        return [(out, last, expected, versions)]
    return []


@pytest.mark.parametrize("far_read", ["auto", "get", "reply"])
def test_a_store_is_whole_once_assembled(cluster: Cluster, far_read: str) -> None:
    servers = min(2, cluster.world - 1)
    cluster.roles = assign("async", cluster.hosts, cluster.node_of, servers)
    shards, rule = cut(N, servers, 8), make_rule("sgd")
    design = Design(shards, "float64", rule, lambda version: -1.0, far_read=far_read)
    wrong: list[object] = []
    half = assemble(cluster, design)
    if half is not None:
        if isinstance(half, ServerHalf):
            enough: set[int] = set()
            half.server.params[:] = 1
            half.server.start_from(0)

            def until(request: MPI.Request) -> None:
                while not request.Test():
                    serve(cluster, half, enough)

            half.open(until)
            while len(enough) < len(cluster.roles.workers):
                serve(cluster, half, enough)
            cluster.barrier()
            half.close()
        else:
            wrong += work(cluster, half)
            if half.remote_way not in (("get", "reply") if far_read == "auto" else (far_read,)):
                wrong.append(half.remote_way)
        check(cluster.comm, not wrong, wrong)
    half.free()
    with pytest.raises(KeyError):
        half.window.view(cluster.rank, "params")


@pytest.mark.world(max_size=3)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_plain_job_imports_no_feature(
    cluster: Cluster, node_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Code for ranks that die, for tables and for the record cannot be imported, nor is it."""
    package = Path(mpips.__file__).parent
    for path in package.rglob("*.py"):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        if name.removeprefix("mpips.").startswith(FEATURES):
            monkeypatch.setitem(sys.modules, name, None)
    words = f"--mode={mode} --epochs=1 --batch-size=200 --hidden=8 --quiet --node-size={node_size}"
    out = cluster.comm.bcast(str(tmp_path / "run"))
    line = parse_command_line([*words.split(), f"--out={out}", "--checkpoint-every=2steps"])
    code = session.run(line, time.perf_counter())
    check(cluster.comm, code == 0, code)
