"""What a job reserves for the rows of its tables."""

from mpips.planning.tables import rows_of_area


def test_room_of_a_push() -> None:
    """16 MiB, or 1,024 rows, but no more than 256 MiB, and one row in any case."""
    assert rows_of_area(1 << 10) == 1 << 14
    assert rows_of_area(1 << 15) == 1 << 10
    assert rows_of_area(1 << 20) == 256
    assert rows_of_area(1 << 30) == 1
