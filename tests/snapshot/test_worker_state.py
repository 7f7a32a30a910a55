"""What a resumed run says of the state that workers or ranks have for themselves."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpips.config.command_line import load
from mpips.config.jobfile import to_toml
from mpips.layout import Layout
from mpips.layout.roles import assign, shares
from mpips.session.summary import say_left_out
from mpips.snapshot.worker_state import names, resume_notes

ONE, TWO = (f"--mode async --servers 1 --codec topk --node-size {size}" for size in (1, 2))
SYNC = "--mode sync --node-size 2 --codec"
BACKUP = f"5 {SYNC} topk --servers 1 --backup-workers 1"
PACK_NOW = "residual goes to those who pack now: "


def job_of(text: str, saved: Any = None) -> Any:
    """Return what is asked of a job, given as its ranks and options, and what it resumes."""
    config = load(text.split()[1:])
    ranks = range(int(text.split()[0]))
    node_of = [rank // (config.node_size or len(ranks)) for rank in ranks]
    roles = assign(config.mode, ["here" for _ in ranks], node_of, config.servers)
    cluster = SimpleNamespace(roles=roles, node_of=node_of, nodes=len(set(node_of)))
    layout = Layout.of({"w": (640, 320)})
    return SimpleNamespace(
        config=config, cluster=cluster, layout=layout, shards=shares(layout.size, roles, 4),
        dtype=np.dtype(config.dtype), checkpoint=saved, base_step=9, own_slots=(), slots=(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (f"4 {ONE}", f"4 {ONE}", "each worker goes on with its own residual"),
        (f"4 {ONE}", f"3 {ONE}", f"{PACK_NOW}saved by 3 workers, now 2"),
        (f"3 {ONE}", f"3 {TWO}", f"{PACK_NOW}nodes of the ranks are [0, 0, 1], were [0, 1, 2]"),
        (f"5 {TWO}", f"5 {TWO} --node-aggregation", f"{PACK_NOW}node_aggregation is True, were F"),
        (f"3 {ONE}", f"3 {ONE} --codec none", "residual is left out: this run has none"),
        ("3 --servers 1", f"3 {ONE}", "residual begins at zero: none that fits was saved"),
        (f"4 {SYNC} topk", f"4 {SYNC} topk", "each rank goes on with its own residual"),
        (f"4 {SYNC} topk", f"4 {SYNC} onebit", "each rank goes on with its own residual"),
        (f"4 {SYNC} topk", f"2 {SYNC} topk --node-size 1", f"the sum of the ranks' {PACK_NOW}"),
        (f"4 {SYNC} topk", f"4 {SYNC} powersgd", "error, basis begins anew: none that fits was"),
        (f"4 {SYNC} powersgd", f"4 {SYNC} powersgd --powersgd-rank 2", "ranks' basis begins anew"),
        (f"4 {SYNC} powersgd", f"4 {SYNC} none", "error, basis is left out: this run has none"),
        (BACKUP, f"5 {SYNC} topk --servers 1", "that of mode sync with backup workers is left out"),
    ],
)
def test_what_becomes_of_own_state(before: str, now: str, said: str) -> None:
    first, told = job_of(before), list[str]()
    roles, node_of = first.cluster.roles, first.cluster.node_of
    own = {"own": [{}] * len(roles.workers)} if names(first) else {}
    state = {"world": {"servers": list(roles.servers), "node_of": node_of}, **own}
    saved = {"config": to_toml(first.config), "worker_names": names(first), "state": state}
    second = job_of(now, SimpleNamespace(**saved))
    say_left_out(second, SimpleNamespace(say=told.append))  # type: ignore[arg-type]
    told += resume_notes(second)
    assert [said in line for line in told].count(True) == 1, told
