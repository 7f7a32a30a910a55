"""Rows of a table in a server's memory: read, changed, and both at once."""

import contextlib
import itertools
import mmap
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from mpips.errors import UserError
from mpips.kernels import row_reads, rows
from mpips.kernels.compiled import Kernel
from mpips.layout.tables import Normal, Ownership, Table, Uniform, Zeros, combine
from mpips.library.optimizers import SGD, Adagrad
from mpips.optim.row_rules import make_row_rule
from mpips.planning.tables import JobTable
from mpips.tables.capacity import KEY_BYTES, divide
from mpips.tables.server import evict_old
from mpips.tables.shard import NodeRows, Reads, TableShard, row_fields, warm

CAPACITIES = pytest.mark.parametrize("capacity", ["full", "lazy"])


def memory_of(ownership, server, rule, dtype="f4", most=None):
    fields = row_fields(ownership, server, rule, dtype, most)
    return {field.name: np.zeros(field.shape, field.dtype) for field in fields}


class Servers:
    """All servers of a table, and a reader that sees them."""

    def __init__(self, table, servers, optimizer=None, dtype="f4", seed=0, most=None):
        self.ownership = Ownership("item", table, servers, seed)
        self.dtype, rule = dtype, make_row_rule(optimizer or SGD(0.1))
        self.memories = [memory_of(self.ownership, k, rule, dtype, most) for k in range(servers)]
        self.shards = [
            TableShard(self.ownership, k, memory, rule) for k, memory in enumerate(self.memories)
        ]
        self.served = [SimpleNamespace(shard=shard) for shard in self.shards]
        self.seen = [NodeRows(self.ownership, {k: m}) for k, m in enumerate(self.memories)]

    def read(self, ids):
        out = np.full((len(ids), self.ownership.table.dim), np.nan, self.dtype)
        places = self.ownership.places(np.asarray(ids))
        for rows_seen in self.seen:
            assert rows_seen.gather(places, out) == Reads(0, 0)
        return out

    def push(self, ids, grads, rate=0.1):
        grouped = self.ownership.group(np.asarray(ids))
        sums = combine(grouped, grads)
        for shard in self.shards:
            mine = grouped.of(shard.server)
            shard.apply(grouped.local[mine], sums[mine], rate)


@CAPACITIES
@pytest.mark.parametrize("init", [Normal(0.5), Uniform(0.5), Zeros()])
@pytest.mark.parametrize("dim", [1, 2, 5, 32])
def test_untouched_rows_are_the_same_for_any_number_of_servers(init, dim, capacity):
    ids = np.random.default_rng(0).integers(0, 5000, 3000)
    table = Table(5000, dim, init, capacity=capacity)
    one, *others = (Servers(table, n).read(ids) for n in (1, 2, 3))
    blocks = Table(5000, dim, init, capacity=capacity, ownership="blocks")
    others += [Servers(blocks, n).read(ids) for n in (1, 3)]
    for other in others:
        assert one.tobytes() == other.tobytes()
    assert one.tobytes() == Servers(Table(5000, dim, init), 1).read(ids).tobytes()
    again = Servers(table, 2, seed=1).read(ids)
    assert (again == one).all() == isinstance(init, Zeros)


def test_normal_and_uniform_rows_are_what_they_say():
    ids = np.arange(20_000)
    normal = Servers(Table(20_000, 16, Normal(0.1)), 1).read(ids).astype("f8") / 0.1
    moments = [(normal**k).mean() for k in (1, 2, 3, 4)]
    assert np.allclose(moments, [0, 1, 0, 3], atol=0.05)
    assert np.abs(np.corrcoef(normal.T) - np.eye(16)).max() < 0.05
    inside = [(np.abs(normal) < x).mean() for x in (0.5, 1, 2, 3)]
    assert np.allclose(inside, [0.38292, 0.68269, 0.95450, 0.99730], atol=0.003)
    uniform = Servers(Table(20_000, 16, Uniform(3)), 1).read(ids).astype("f8") / 3
    assert np.abs(uniform).max() <= 1
    assert np.allclose([uniform.mean(), (uniform**2).mean()], [0, 1 / 3], atol=0.01)


@CAPACITIES
@pytest.mark.parametrize(("servers", "how"), [(1, "hash"), (2, "blocks"), (3, "hash")])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_pushes_are_the_serial_ones(servers, how, dtype, capacity):
    rng = np.random.default_rng(3)
    table = Table(200, 3, Normal(0.1), capacity=capacity, ownership=how)
    ours = Servers(table, servers, SGD(0.1), dtype)
    serial = ours.read(np.arange(200))
    touched = set()
    for _ in range(5):
        ids = rng.integers(0, 200, 40)
        grads = rng.standard_normal((40, 3)).astype(dtype)
        total = np.zeros_like(serial)
        np.add.at(total, ids, grads)
        serial -= serial.dtype.type(0.1) * total
        ours.push(ids, grads)
        touched |= set(ids.tolist())
    assert (ours.read(np.arange(200)) == serial).all()
    assert sum(shard.touched for shard in ours.shards) == len(touched) < 200
    lines = [memory["tables/item/lines"] for memory in ours.memories]
    assert sum(np.count_nonzero(each.any(1)) for each in lines) == len(touched), "no other page"


def test_pull_by_place():
    servers = Servers(Table(100, 4), 2)
    ownership, out = servers.ownership, np.empty((3, 4), "f4")
    for shard in servers.shards:
        for local in ([3, 1, 3], [0, 49, 49], [2, 2, 2]):
            shard.pull(np.array(local), out)
            rows_of = ownership.rows_of(shard.server, np.array(local))
            assert (out == servers.read(rows_of)).all()
    shard = servers.shards[1]
    for bad in ([0, 50, 0], [-1, 0, 0]):
        with pytest.raises(ValueError, match="of server 1"):
            shard.pull(np.array(bad), out)
        with pytest.raises(ValueError, match="of server 1"):
            shard.apply(np.sort(bad), out, 0.1)
    with pytest.raises(ValueError, match="not increase"):
        shard.apply(np.array([1, 1, 2]), out, 0.1)
    with pytest.raises(ValueError, match=r"rows of shape \(3, 4\) for 2 places"):
        shard.pull(np.array([1, 2]), out)


@CAPACITIES
def test_rows_of_several_servers_are_read_in_one_pass(capacity):
    servers, ids = Servers(Table(500, 3, capacity=capacity), 4), np.arange(500).repeat(2)
    servers.push(np.arange(0, 500, 2), np.ones((250, 3), "f4"))
    before = [{name: a.copy() for name, a in memory.items()} for memory in servers.memories]
    some = NodeRows(servers.ownership, {k: servers.memories[k] for k in (0, 3)})
    out = np.full((1000, 3), np.nan, "f4")
    assert some.gather(servers.ownership.places(ids), out) == Reads(0, 0)
    owners, _ = servers.ownership.locate(ids)
    mine = (owners == 0) | (owners == 3)
    assert out[mine].tobytes() == servers.read(ids[mine]).tobytes()
    assert np.isnan(out[~mine]).all()
    for was, memory in zip(before, servers.memories, strict=True):  # reading writes nothing
        assert all((array == was[name]).all() for name, array in memory.items())


@CAPACITIES
def test_lines_go_to_other_servers_whole(capacity):
    """As a checkpoint does it: all that was touched, by row, into another number of servers."""
    table = Table(70_000, 2, Normal(0.1), capacity=capacity)
    three, two = (Servers(table, n, Adagrad(0.1)) for n in (3, 2))
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 70_000, 30_000)
    three.push(ids, rng.standard_normal((30_000, 2)).astype("f4"))
    for shard in three.shards:
        for slot, lines in shard.snapshot().pieces():
            moved = three.ownership.rows_of(shard.server, shard.places(slot))
            owners, places = two.ownership.locate(moved)
            for other in two.shards:
                mine = owners == other.server
                other.put(places[mine], lines[mine])
    assert sum(shard.touched for shard in two.shards) == len(set(ids.tolist()))
    for servers in (three, two):
        servers.push(ids, np.ones((30_000, 2), "f4"))
    every = np.arange(70_000)
    assert three.read(every).tobytes() == two.read(every).tobytes()


@CAPACITIES
def test_a_row_that_is_always_written_is_taken_torn_and_counted(capacity):
    servers = Servers(Table(100, 4, capacity=capacity), 1)
    servers.push(np.arange(100), np.ones((100, 4), "f4"))
    before = servers.read(np.arange(100))
    servers.memories[0]["tables/item/stripes"][1] |= rows.WRITING
    out = np.empty((100, 4), "f4")
    found = servers.seen[0].gather(servers.ownership.places(np.arange(100)), out)
    assert found == Reads(32 * row_reads.READS, 32)
    assert (out == before).all()
    # Whoever goes on makes it even again.
    servers.push(np.arange(100), np.zeros((100, 4), "f4"))
    assert (servers.read(np.arange(100)) == before).all()


@contextlib.contextmanager
def beside(work):
    """Do `work` again and again in a thread, within the block."""
    done = threading.Event()

    def repeat():
        while not done.is_set():
            work()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("how", ["apply", "put", "put_back"])
def test_rows_are_whole_while_they_are_written(how):
    """Each write adds 1 to all of a row, so that a torn one has two values."""
    dim, n = 4096, 8
    servers = Servers(Table(n, dim, Zeros()), 1, SGD(1.0))
    (shard,), local, count = servers.shards, np.arange(n), itertools.count(1)
    shard.put(local, np.zeros((n, dim), "f4"))

    def write():
        lines = np.full((n, dim), -1 if how == "apply" else next(count), "f4")
        more = {"apply": (1.0,), "put": (), "put_back": (np.ones(n, np.int64),)}[how]
        getattr(shard, how)(local, lines, *more)

    with beside(write):
        out = np.empty((n, dim), "f4")
        again, last = 0, np.zeros(n)
        for _ in range(100_000):
            found = servers.seen[0].gather(local, out)
            if found.torn == 0:
                assert (out == out[:, :1]).all()
                assert (out[:, 0] >= last).all()
                last = out[:, 0].copy()
            again += found.again
            if again > 20 and last.min() > 0:
                break
    assert again > 20, "no read met a write"
    assert last.min() > 0


@CAPACITIES
def test_warm_loads_all_that_a_step_needs(capacity):
    table = Table(1000, 3, capacity=capacity)
    warm(table, make_row_rule(Adagrad()), "f8")
    kernels = [kernel for kernel in vars(rows).values() if isinstance(kernel, Kernel)]
    before = [len(kernel.variants) for kernel in kernels]
    servers = Servers(table, 2, Adagrad(), "f8")
    servers.push(np.arange(1000), np.ones((1000, 3)))
    servers.read(np.arange(1000))
    assert [len(kernel.variants) for kernel in kernels] == before


def test_lazy_tables_grow_while_they_are_read():
    """Rows that a reader has seen touched stay so, through all sizes of the index."""
    n = 200_000
    servers = Servers(Table(n, 1, Zeros(), capacity="lazy"), 1, SGD(1.0))
    (shard,), header = servers.shards, servers.memories[0]["tables/item/header"]
    order = np.random.default_rng(0).permutation(n)
    pieces = iter(np.array_split(order, 400))
    first = header[rows.BITS]

    def touch():
        piece = np.sort(next(pieces, order[:1]))
        shard.apply(piece, np.full((len(piece), 1), -1, "f4"), 1.0)

    seen, out, every = np.zeros(n, bool), np.empty((n, 1), "f4"), np.arange(n)
    steps = set()
    with beside(touch):
        for _ in range(100_000):
            steps.add(int(header[rows.BITS]))
            servers.seen[0].gather(every, out)
            now = out[:, 0] >= 1
            assert (now >= seen).all(), "a row was lost"
            seen = now
            if seen.all():
                break
    assert seen.all()
    assert shard.touched == n
    assert header[rows.BITS] >= first + 7
    assert len(steps) > 1, "it had grown before it was read"


def test_rows_that_are_evicted_are_as_at_first():
    """Values and slots, through many sizes of the index; the others stay, wherever they move."""
    n = 30_000
    servers = Servers(Table(n, 3, Normal(0.5), evict_after=2), 2, Adagrad(0.1))
    fresh, every, rng = servers.read(np.arange(n)), np.arange(n), np.random.default_rng(0)
    serial, slots, seen = fresh.copy(), np.zeros((n, 3), "f4"), np.full(n, -9)
    for epoch, most in enumerate([9000, 200, 9000, 1, 5000, 5000, 3, 3, 900, 2]):
        ids = np.unique(rng.integers(0, n, most))
        grads = rng.uniform(0.5, 1.5, (len(ids), 3)).astype("f4")
        for shard in servers.shards:
            shard.ages.epoch = epoch
        servers.push(ids, grads)
        slots[ids] += grads * grads
        serial[ids] -= np.float32(0.1) * grads / (np.sqrt(slots[ids]) + np.float32(1e-10))
        seen[ids] = epoch
        assert evict_old(servers.served, epoch + 1)
        old = seen < epoch - 1
        serial[old], slots[old] = fresh[old], 0
        np.testing.assert_allclose(servers.read(every), serial, rtol=1e-5, atol=1e-6)
        assert (servers.read(every)[old] == fresh[old]).all()
        assert sum(shard.touched for shard in servers.shards) == np.count_nonzero(~old)
    assert sum(shard.ages.evicted for shard in servers.shards) > 10_000
    lines = [memory["tables/item/lines"] for memory in servers.memories]
    assert sum(np.count_nonzero(each.any(1)) for each in lines) == np.count_nonzero(~old)


def test_no_row_is_evicted_while_a_snapshot_is_taken():
    servers = Servers(Table(100, 1, Zeros(), evict_after=1), 1, SGD(1.0))
    (shard,) = servers.shards
    servers.push([1, 2, 3], np.ones((3, 1), "f4"))
    pieces = shard.snapshot().pieces()
    assert len(next(pieces)[0]) == 0
    assert not evict_old(servers.served, 2)
    shard.ages.epoch = 7
    servers.push([1], np.ones((1, 1), "f4"))
    seen = np.concatenate([piece[-1] for piece in pieces])
    assert seen.tolist() == [0, 0, 0], "when the snapshot began"
    assert not shard.ages.shrunk
    assert evict_old(servers.served, 9)
    assert (shard.touched, shard.ages.evicted, shard.ages.shrunk) == (0, 3, True)
    assert len(shard.snapshot().pieces().__next__()[0]) == 0
    assert not shard.ages.shrunk


def test_a_row_is_itself_while_rows_are_evicted():
    """Row k holds a count and k + 1 times this, or what it has at first: no other row's numbers."""
    n, kept = 3000, 300
    servers = Servers(Table(n, 2, Zeros(), evict_after=1), 1, SGD(1.0), "f8")
    (shard,), rng = servers.shards, np.random.default_rng(0)
    order = rng.permutation(n)
    number = np.empty(n)
    number[order] = np.arange(1, n + 1)

    def work():
        some = order[kept + rng.integers(0, n - kept, int(rng.choice([1, 30, 900, 2500])))]
        local = np.unique(np.concatenate([order[:kept], some]))
        shard.ages.epoch += 1
        shard.apply(local, -np.stack([np.ones(len(local)), number[local]], 1), 1.0)
        shard.ages.evict(shard.ages.epoch)

    work()
    out, last, local, sizes = np.empty((n, 2)), np.zeros(kept), np.arange(n), set()
    with beside(work):
        for k in range(100_000):
            sizes.add(int(servers.memories[0]["tables/item/header"][rows.BITS]))
            if servers.seen[0].gather(local, out).torn:
                continue
            np.testing.assert_array_equal(out[:, 1], out[:, 0] * number)
            assert (out[order[:kept], 0] >= last).all(), "a row was lost"
            last = out[order[:kept], 0].copy()
            if k > 300 and shard.ages.evicted > 4 * n and len(sizes) > 2:
                break
    assert shard.ages.evicted > 4 * n
    assert len(sizes) > 2


@pytest.mark.parametrize("evict_after", [None, 1])
def test_what_is_in_use_is_what_rows_have(evict_after):
    servers = Servers(Table(100_000, 4, capacity="lazy", evict_after=evict_after), 1, Adagrad(0.1))
    shard, ids = servers.shards[0], np.arange(5000)
    servers.push(ids, np.ones((len(ids), 4), "f4"))
    used, whole = shard.used(), servers.memories[0]
    line, words = whole["tables/item/lines"][:1].nbytes, 8 * (len(ids) // 32 + 1)
    most = len(ids) * (line + 4 + 4 * bool(evict_after)) + words + 4 * 4 * len(ids)
    assert sum(array.nbytes for array in used) <= most
    parts = ["lines", "stripes", "keys", "index", *(["seen"] if evict_after else [])]
    assert [array.dtype for array in used] == [whole[f"tables/item/{n}"].dtype for n in parts]
    assert all(map(np.shares_memory, used, (whole[f"tables/item/{name}"] for name in parts)))
    assert np.count_nonzero(used[3]) == len(ids)
    full = Servers(Table(100_000, 4, capacity="full"), 1, Adagrad(0.1))
    assert [len(array) for array in full.shards[0].used()] == [100_000, 3125]


def test_a_lazy_table_that_is_full_says_so():
    servers = Servers(Table(1_000_000, 2, capacity="lazy"), 1, most=50)
    servers.push(np.arange(40), np.ones((40, 2), "f4"))
    before = servers.read(np.arange(60))
    with pytest.raises(UserError, match="more than 50 rows of table 'item' touched at server 0"):
        servers.push(np.arange(30, 60), np.ones((30, 2), "f4"))
    assert (servers.read(np.arange(60)) == before).all()


@pytest.mark.parametrize("dim", [1, 16])
def test_lazy_memory_is_that_of_the_rows_touched(dim):
    """Of 100 M rows; pages that have been written are counted."""
    ownership = Ownership("item", Table(100_000_000, dim, capacity="lazy"), 1)
    rule = make_row_rule(Adagrad(0.1))
    memory = {
        field.name: np.frombuffer(mmap.mmap(-1, field.nbytes), field.dtype).reshape(field.shape)
        for field in row_fields(ownership, 0, rule, "f4")
    }
    shard = TableShard(ownership, 0, memory, rule)
    rng = np.random.default_rng(0)
    before = shared_bytes()
    for _ in range(20):
        local = np.unique(rng.integers(0, 100_000_000, 10_000))
        shard.apply(local, np.ones((len(local), dim), "f4"), 0.1)
    count = shard.touched
    assert count > 190_000
    keys = 4 * count + 4 * (1 << int(memory["tables/item/header"][rows.BITS]))
    assert shared_bytes() - before < 1.15 * (count * 8 * dim + keys) + (1 << 20)


def shared_bytes():
    """Return how much shared memory this process has written or read."""
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("RssShmem"))
    return int(line.split()[1]) * 1024


# Capacity: how a host's memory is divided among lazy tables ---------------------------------------

LINE = 4 * 8 + KEY_BYTES  # bytes of a row of a lazy table


def lazy_table(name, rows, **more):
    rule = make_row_rule(SGD())
    return JobTable(name, Table(rows, 8, capacity="lazy", **more), rule, 0, 10, lambda step: 0.1)


@pytest.mark.parametrize(
    ("room", "small", "large"),
    [
        (10_000_000, 500, 50_000),  # there is room for all
        (1000 * LINE, 250, 250),  # an equal share for each of four
        (4000 * LINE, 500, 1500),  # what small ones leave is for the large ones
        (-5, 0, 0),
    ],
)
def test_small_tables_have_all_their_rows_first(room, small, large):
    tables = [lazy_table("large", 100_000), lazy_table("small", 1000)]
    found = divide(tables, (0, 1), room, 2, 4)
    assert found == {(name, k): {"small": small, "large": large}[name] for name, k in found}
    assert len(found) == 4


@pytest.mark.parametrize("evict_after", [None, 1])
@pytest.mark.parametrize("room", [80, *np.geomspace(50_000, 50_000_000, 20).astype(int).tolist()])
def test_what_is_reserved_is_what_was_counted(room, evict_after):
    each = lazy_table("large", 1_000_000, evict_after=evict_after)
    most = divide([each], (0,), room, 1, 4)["large", 0]
    fields = row_fields(each.owned_by(1), 0, each.rule, "f4", most)
    assert sum(field.nbytes for field in fields) <= room + (1 << 15)
