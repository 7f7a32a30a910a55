"""Tables of rows: exact through stops, kills and changes of servers; what is refused in a step."""

from pathlib import Path

import pytest
from launch import ROOT, run
from runs import kill_each, newest

from mpips.errors import UserError
from mpips.layout.tables import Table
from mpips.library.model import Parameters

PROGRAM = str(ROOT / "tests" / "library" / "programs" / "tables.py")


@pytest.mark.launch
def test_tables_in_one_world(tmp_path: Path) -> None:
    found = run(5, [PROGRAM, "all", str(tmp_path)], tmp_path).check()
    assert found.output.count(" is done") == 8, found.output


@pytest.mark.launch
@pytest.mark.long
def test_rows_are_exact_through_kills(tmp_path: Path) -> None:
    """Whenever all ranks are killed, the newest checkpoint has each push once or not at all."""
    out = tmp_path / "out"
    kill_each(PROGRAM, out, (1, 2), 0.3)
    assert newest(out).step < 132, "it was killed"
    run(4, [PROGRAM, "kills", str(out), "3"], tmp_path).check()
    assert newest(out).step == 132
    assert newest(out).read_params().tolist() == [4.0] * 230


def test_a_model_may_be_tables_alone() -> None:
    given = Parameters({}, tables={"a": Table(3, 2)})
    assert (given.layout.size, given.dtype) == (0, "float32")
    with pytest.raises(UserError, match="no params, expected a mapping of names to arrays"):
        Parameters({})
