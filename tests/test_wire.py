"""What a job says about its packing."""

from mpips.config import Config
from mpips.layout import cut
from mpips.roles import assign
from mpips.wire import told


def line(config: Config, node_size: int, servers: int, n: int) -> str | None:
    node_of = [rank // node_size for rank in range(4)]
    roles = assign("async", ["host"] * 4, node_of, servers)
    return told(config, roles, node_of, cut(n, servers))


def test_nothing_is_said_where_nothing_is_asked_for() -> None:
    assert line(Config(), 1, 1, 1 << 20) is None


def test_what_is_packed_is_said() -> None:
    both = Config(codec="int8", pull_codec="fp16")
    start = "packed between nodes: pushes by int8, pulls by fp16; "
    assert line(both, 1, 1, 1 << 20) == f"{start}3 of 3 slices are large enough"
    assert line(both, 2, 1, 1 << 20) == f"{start}2 of 2 slices are large enough"
    assert line(both, 2, 2, 1 << 20) == f"{start}2 of 2 slices are large enough"
    only = "packed between nodes: pulls by bf16; 0 of 3 slices are large enough"
    assert line(Config(pull_codec="bf16"), 1, 1, 16383) == only


def test_one_node_packs_nothing() -> None:
    told_so = "nothing is packed: no worker is on another node than a server"
    assert line(Config(codec="topk"), 4, 1, 1 << 20) == told_so
