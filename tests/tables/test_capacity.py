"""How a host's memory is divided among lazy tables."""

import pytest

from mpips.layout.tables import Table
from mpips.library.optimizers import SGD
from mpips.optim.row_rules import make_row_rule
from mpips.planning.tables import JobTable
from mpips.tables.capacity import KEY_BYTES, divide
from mpips.tables.shard import row_fields

DIM = 8
LINE = 4 * DIM + KEY_BYTES


def table(name: str, rows: int) -> JobTable:
    rule = make_row_rule(SGD())
    given = Table(rows, DIM, capacity="lazy")
    return JobTable(name, given, rule, seed=0, push_rows=10, rate=lambda step: 0.1)


@pytest.mark.parametrize(
    ("room", "small", "large"),
    [
        (10_000_000, 500, 50_000),  # there is room for all
        (1000 * LINE, 250, 250),  # an equal share for each of four
        (4000 * LINE, 500, 1500),  # what small ones leave is for the large ones
        (-5, 0, 0),
    ],
)
def test_small_tables_have_all_their_rows_first(room: int, small: int, large: int) -> None:
    tables = [table("large", 100_000), table("small", 1000)]
    found = divide(tables, (0, 1), room, 2, 4)
    assert found == {(name, k): {"small": small, "large": large}[name] for name, k in found}
    assert len(found) == 4


@pytest.mark.parametrize("most", [1, 767, 768, 769, 100_000, 393_217])
def test_what_is_reserved_is_what_was_counted(most: int) -> None:
    each = table("large", 1_000_000)
    fields = row_fields(each.owned_by(1), 0, each.rule, "f4", most)
    assert sum(field.nbytes for field in fields) <= most * LINE + (1 << 15)
