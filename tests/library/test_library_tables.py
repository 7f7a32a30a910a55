"""Tables of rows: exact through stops, kills and changes of servers; what is refused in a step."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import ROOT, Running, environment, run
from runs import is_whole, newest, wait_for

from mpips.checkpoint import list_checkpoints
from mpips.checkpoint.files import folder_step
from mpips.errors import UserError
from mpips.layout.tables import Table
from mpips.library.model import Parameters

PROGRAM = str(ROOT / "tests" / "library" / "programs" / "tables.py")


@pytest.mark.launch
def test_tables_in_one_world(tmp_path: Path) -> None:
    found = run(5, [PROGRAM, "all", str(tmp_path)], tmp_path).check()
    assert found.output.count(" is done") == 7, found.output


def newest_step(out: Path) -> int:
    """Return the step of the newest checkpoint that is whole; 0 without any."""
    return max((folder_step(p) or 0 for p in list_checkpoints(out) if is_whole(p)), default=0)


@pytest.mark.launch
@pytest.mark.long
def test_rows_are_exact_through_kills(tmp_path: Path) -> None:
    """Whenever all ranks are killed, the newest checkpoint has each push once or not at all."""
    out, chance = tmp_path / "out", random.Random(1)
    args, env = [PROGRAM, "kills", str(out)], {**environment(), "PYTHONPATH": str(ROOT)}
    for servers in (1, 2):
        before = newest_step(out)
        with Running(4, [*args, str(servers)], tmp_path) as job:
            wait_for(job, lambda n=before: newest_step(out) > n)
            time.sleep(chance.uniform(0, 0.3))
            assert job.process.poll() is None, job.output()
            job.kill()
        check = [sys.executable, PROGRAM, "check", str(out)]
        subprocess.run(check, cwd=tmp_path, env=env, check=True, timeout=60)
    assert newest(out).step < 132, "it was killed"
    run(4, [*args, "3"], tmp_path).check()
    assert newest(out).step == 132
    assert newest(out).read_params().tolist() == [4.0] * 230


def test_a_model_may_be_tables_alone() -> None:
    given = Parameters({}, tables={"a": Table(3, 2)})
    assert (given.layout.size, given.dtype) == (0, "float32")
    with pytest.raises(UserError, match="no params, expected a mapping of names to arrays"):
        Parameters({})
