"""The table of tags."""

from mpips.mpi import tags

PROMISED = 32767  # MPI-4.1, 9.1.2: the least value that MPI_TAG_UB may have
KNOWN = {name: value for name, value in vars(tags).items() if name.startswith("TAG_")}


def test_no_two_kinds_of_message_have_the_same_tag() -> None:
    assert len(set(KNOWN.values())) == len(KNOWN), KNOWN


def test_tags_are_legal_and_apart_from_those_of_bodies() -> None:
    rest = range(tags.TAG_REST, tags.TAG_REST + tags.BODY_TAGS)
    assert rest[-1] <= PROMISED
    for name, value in KNOWN.items():
        assert 0 < value <= PROMISED, name
        assert name == "TAG_REST" or value not in rest, name
