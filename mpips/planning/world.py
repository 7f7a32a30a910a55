"""Hosts, nodes and servers of hypothetical ranks."""

from mpips.errors import UserError

World = tuple[list[str], list[int]]  # host and node of each rank


def spread(ranks: int, nodes: int, node_size: int) -> World:
    """Return host and node of each rank.

    If neither nodes nor their size are given, each has a node.

    Args:
        ranks: Number of ranks.
        nodes: Number of nodes; 0 if not given.
        node_size: Ranks of a node; 0 if not given.

    Raises:
        UserError: If there are more nodes than ranks, or nodes and their size are given.
    """
    if nodes > ranks:
        raise UserError(f"nodes {nodes} with {ranks} ranks", f"nodes <= {ranks}", "set --nodes")
    if nodes > 1 and node_size:
        raise UserError(f"nodes {nodes} with node_size {node_size}", "one of them")
    nodes = nodes or ranks
    node_of = [rank // node_size if node_size else rank * nodes // ranks for rank in range(ranks)]
    return [f"node{node}" for node in node_of], node_of


def server_counts(ranks: int) -> list[int]:
    """Return the numbers of servers to try: each up to 64, and further ones 1 to 2 % apart."""
    found, count = list[int](), 0
    while count < ranks:
        found.append(count)
        count += 1 + count // 64
    return found
