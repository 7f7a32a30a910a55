"""Requests for rows of other nodes, without MPI's messages."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from mpips.layout.roles import Roles
from mpips.layout.tables import Table
from mpips.mpi.start import MPI
from mpips.optim.row_rules import Sgd
from mpips.planning.tables import JobTable
from mpips.transport.remote_rows import HEAD, RemoteRows


def test_all_messages_of_a_call_want_the_same_updates() -> None:
    """Also those that are sent when the worker's reads want others."""
    heads, here = list[list[int]](), list[bool]()

    def send(message: np.ndarray, rank: int, tag: int) -> MPI.Request:
        heads.append(message[: 8 * HEAD].view("i8").tolist())
        return MPI.REQUEST_NULL

    coming = SimpleNamespace(Test=lambda: bool(here))
    arrays = SimpleNamespace(begin_send=send, begin_receive=lambda *what: coming)
    cluster: Any = SimpleNamespace(
        roles=Roles((0,), (1,)), arrays=arrays, is_local=lambda rank: False
    )
    table = JobTable("t", Table(9, 2), Sgd(1.0), 0, 2, lambda version: 1.0)
    rows = RemoteRows(cluster, 0, table, np.dtype("f4"), None)
    rows.want(5, 6)
    request = rows.begin(table.owned_by(1).group(np.arange(3)))
    rows.want(4, 5)
    here.append(True)
    assert request.advance()
    assert heads == [[0, 2, 5, 6], [0, 1, 5, 6]]
