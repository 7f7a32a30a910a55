"""Tables of rows: exact through stops, kills and changes of servers; what is refused in a step."""

from pathlib import Path

import pytest
from launch import ROOT, run
from runs import kill_each, newest

PROGRAMS = ROOT / "tests" / "library" / "programs"
PROGRAM = str(PROGRAMS / "tables.py")


# The MPIs share out what is served and what goes in rounds (tests/matrix/test_serial.py).


@pytest.mark.launch
@pytest.mark.one_mpi
def test_tables_in_one_world(tmp_path: Path) -> None:
    found = run(5, [PROGRAM, "served", str(tmp_path)], tmp_path, 240).check()
    assert found.output.count(" is done") == 7, found.output


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.other_mpi
def test_rows_are_exact_through_kills(tmp_path: Path) -> None:
    """Whenever all ranks are killed, the newest checkpoint has each push once or not at all."""
    out = tmp_path / "out"
    kill_each(PROGRAM, out, (1, 2), 0.3)
    assert newest(out).step < 102, "it was killed"
    run(4, [PROGRAM, "kills", str(out), "3"], tmp_path).check()
    assert newest(out).step == 102
    assert newest(out).read_params().tolist() == [3.0] * 232


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.one_mpi
def test_a_table_of_200_m_rows_takes_those_touched_and_goes_on_elsewhere(tmp_path: Path) -> None:
    for servers in (1, 2, 3):
        program = [str(PROGRAMS / "huge_table.py"), str(tmp_path / "out"), str(servers)]
        found = run(servers + 1, program, tmp_path, timeout_s=400).check().output
        assert found.count("of rows, slots and keys") == servers, found
        assert "of 200,000,000 rows are exact" in found
    assert "5,000,000 of" in found
