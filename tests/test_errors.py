"""What a rank prints: whole lines, whatever else is printed on the same terminal."""

import os
import subprocess
import sys

import pytest

from mpips.errors import complain, write_line

LINES = 200
PROGRAM = f"""
from mpips.errors import complain, write_line
for _ in range({LINES}):
    complain("a cause")
    write_line("step 1")
"""


@pytest.mark.parametrize("unbuffered", ["1", ""])
def test_lines_of_several_processes_are_whole(unbuffered: str) -> None:
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    reading, writing = os.pipe()
    words = [sys.executable, "-c", PROGRAM]
    ranks = [subprocess.Popen(words, stdout=writing, stderr=writing, env=env) for _ in range(2)]
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        lines = pipe.read().splitlines()
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert sorted(lines) == ["mpips: a cause"] * 2 * LINES + ["step 1"] * 2 * LINES


def test_where_lines_go(capsys: pytest.CaptureFixture[str]) -> None:
    write_line("a line\nand its second")
    complain(ValueError("a cause"))
    assert capsys.readouterr() == ("a line\nand its second\n", "mpips: a cause\n")
