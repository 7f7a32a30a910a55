"""The words of commands that stand before those of a job."""

import pytest

from mpips.config.jobfile import split_words


@pytest.mark.parametrize(
    ("line", "ours", "job"),
    [
        ("-n 4 -- --lr 1", "-n 4", "--lr 1"),
        ("-n 4 --", "-n 4", ""),
        ("-n 4", "-n 4", None),
        ("-- a.py -- b", "", "a.py -- b"),
    ],
)
def test_words_of_a_job(line: str, ours: str, job: str | None) -> None:
    assert split_words(line.split()) == (ours.split(), None if job is None else job.split())
