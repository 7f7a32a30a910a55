"""Stores beside a program's own MPI code: local and remote, several at once, saved and loaded."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpips
from mpips.checkpoint import need_whole, verify
from mpips.mpi import abort
from mpips.optim import RULES

WORLD = MPI.COMM_WORLD
N, PUSHES = 1000, 40
COUNT = mpips.SGD(1.0)


def push_counts(store: mpips.Store, pushes: int, scale: float = 1.0) -> None:
    """Push -1 at the worker's own elements, so that the parameters count the pushes."""
    assert store.worker is not None
    for _ in range(pushes):
        store.pull()
        grads = store.grads
        grads["seen"][:] = 0
        grads["seen"][store.worker :: store.workers] = -scale
        grads["all"][...] = -scale
        store.push()


def counted(store: mpips.Store, peers: MPI.Comm, folder: Path, pushes: int) -> int:
    """Save, which waits for all pushes, and look at the counts before anybody goes on."""
    step = store.save(folder)
    params = store.pull()
    np.testing.assert_array_equal(params["seen"], pushes)
    assert params["all"] == pushes * store.workers
    assert not params["seen"].flags.writeable
    peers.Barrier()
    return step


def told(call: Callable[[], object], pattern: str) -> None:
    with pytest.raises(mpips.UserError, match=pattern):
        call()


def one(folder: Path, **options: object) -> None:
    """A store whose pushes are counted, saved, spoilt and loaded."""
    params = {"seen": np.zeros(N), "all": np.zeros(())}
    with mpips.Store(None, params, COUNT, **options) as store:
        peers = WORLD.Split(int(store.worker is None), WORLD.rank)
        if store.worker is None:
            told(store.pull, "on a server")
            peers.Free()
            return
        push_counts(store, PUSHES)
        step = counted(store, peers, folder, PUSHES)
        assert step == PUSHES * store.workers == store.versions.max()
        push_counts(store, 3, np.nan)
        told(lambda: store.load(folder / "elsewhere"), "load '.*': no whole .*: none was")
        told(lambda: store.save("/proc/nowhere"), "/proc/nowhere': .*, expected a folder that can")
        told(lambda: store.save(folder / "nan"), "nan': parameters with NaN or infinity, exp")
        told(lambda: store.save(f"{folder}/{store.worker}"), "at once, expected the same call")
        assert store.load(folder) == step
        push_counts(store, 2)
        counted(store, peers, folder, PUSHES + 2)
        peers.Free()


def on_others(folder: Path) -> None:
    """The same parameters on another number of servers, with another rule."""
    params = {"seen": np.zeros(N), "all": np.zeros(())}
    with mpips.Store(None, params, mpips.Adam(0.1), servers=1) as store:
        if store.worker is not None:
            start = store.load(folder)
            assert (store.pull()["seen"] >= PUSHES + 2).all(), "others may go on already"
            push_counts(store, 1)
            step = store.save(folder / "adam")
            assert store.save(folder / "adam") == step
            push_counts(store, 1)
            assert store.save(folder / "adam") == step + store.workers, "goes on with its own"
            other = folder.parent / "remote"
            told(lambda: store.save(other), f"holds step {start}.*nor loaded")
            assert store.load(other) == start, "as the store left it that saved it"
            told(lambda: store.save(folder / "adam"), f"holds step {step + store.workers}")
            push_counts(store, 1)
            assert store.save(other) == start + store.workers, "goes on with what it loaded"
            assert (store.pull()["seen"] > PUSHES + 2).all()


def two_at_once() -> None:
    """One rank serves both, and another one of them and works for the other."""
    params = {"seen": np.zeros(N), "all": np.zeros(())}
    with (
        mpips.Store(WORLD, params, COUNT, server_ranks=[0]) as first,
        mpips.Store(WORLD, {**params, "seen": np.zeros(7)}, COUNT, server_ranks=[0, 1]) as second,
    ):
        for _ in range(10):
            if first.worker is not None and second.worker is not None:
                push_counts(first, 1)
                push_counts(second, 2)
        if second.worker is not None:
            total = second.workers * 20
            while second.pull()["all"] < total:
                pass
            np.testing.assert_array_equal(second.pull()["seen"], 20)


def of_each_other(folder: Path) -> None:
    """Two pairs of ranks serve each other's stores, also while they save, and where one is late."""
    params = {"seen": np.zeros(N), "all": np.zeros(())}
    low, high = [0, 1], [2, 3]
    with mpips.Store(WORLD, params, COUNT, server_ranks=low) as first:
        if first.worker is not None:
            push_counts(first, PUSHES)  # while its servers wait for the other store to begin
        with mpips.Store(WORLD, params, COUNT, server_ranks=high) as second:
            mine = first if second.worker is None else second
            for k in range(5):
                push_counts(mine, PUSHES)
                step = mine.save(folder / str(mine is first))
                assert step == (k + 1 + (mine is first)) * PUSHES * mine.workers
                assert mine.load(folder / str(mine is first)) == step
            while mine.pull()["all"] < step:
                pass


def counting(folder: Path) -> None:
    """One worker's pushes, saved and loaded: the serial rule's bits; updates go back by a load.

    A rule counts its updates from those in its state, also if the state begins anew.
    """
    random, serial = np.random.default_rng(0), RULES["adam"]()
    state, updates, adam = [np.zeros((1 + len(serial.slots), N))], [0], mpips.Adam(0.1)
    # Of each store what it loads before some pushes, if anything, and what it saves after them.
    stores = (
        (COUNT, [("", "1")]), (adam, [("1", "2"), ("", "3"), ("2", "4")]), (adam, [("4", "5")])
    )  # fmt: skip
    for rule, parts in stores:
        with mpips.Store(None, {"w": np.zeros(N)}, rule, servers=1, dtype="float64") as store:
            for load, save in parts if store.worker is not None else ():
                at = int(load or len(state) - 1)
                assert not load or store.load(folder / load) == updates[at]
                now, before = state[at].copy(), PUSHES if rule is adam else 0
                for k in range(1, PUSHES + 1):
                    grad = random.standard_normal(N) * (rule is adam)
                    if rule is adam:
                        serial.apply(now[0], grad, tuple(now[1:]), updates[at] - before + k, 0.1)
                    if store.worker == 0:
                        store.grads["w"][:] = grad
                        store.push()
                state.append(now)
                updates.append(updates[at] + PUSHES)
                assert store.save(folder / save) == updates[-1]
                if store.worker == 0:  # others may find its next pushes
                    assert store.pull()["w"].tobytes() == now[0].tobytes(), save


def main(folder: Path) -> None:
    one(folder / "near")
    one(folder / "servers", servers=2)
    one(folder / "remote", servers=2, node_size=1, far_read="reply")
    one(folder / "nodes", servers=2, node_size=2, read="consistent", inbox=1)
    on_others(folder / "servers")
    two_at_once()
    of_each_other(folder)
    counting(folder / "counts")
    assert WORLD.allreduce(1) == WORLD.size
    assert not verify(need_whole(folder / "servers")[0].path)
    print(f"{WORLD.rank} is done", flush=True)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BaseException as error:  # the other ranks would wait for this one
        abort.abort(abort.raised(error), 1)
