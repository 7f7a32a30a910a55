"""Jobs on several hosts, one of which is gone for a time. Others than this are namespaces of it."""

import os
import platform
import re
import signal
from pathlib import Path

import pytest
from launch import executable
from runs import ENDLESS, SAVED, assert_counts, newest, starts_of
from supervised import N, Supervised, counting_words

from mpips.launch import __main__ as command
from mpips.launch import mpirun
from tests.chaos.hosts import RSH, crash, give_an_address, missing, revive

MOVE = re.compile(
    "answering again: west; on 4 ranks instead of 2 the run would end about [0-9]{3,} s earlier, "
    "a restart costs [0-9]+ s: saving to move there"
)
ROW = re.compile(r"^ +\d+ +\d+  (\S+) +(?:server|worker) \d+ ", re.M)  # of a rank, at a start


def test_hosts_that_do_not_answer_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first start, before any rank."""
    monkeypatch.chdir(tmp_path)
    rsh = executable(tmp_path / "rsh", '#!/bin/sh\necho "no route" >&2\nexit 255\n')
    for more, least in ([], 4), (["--elastic"], 1):
        words = ["--hosts", "east:2,west:2", *more, "--rsh", str(rsh), "--"]
        assert command.main(words) == 2
        told = f"mpips: hosts for 0 ranks, of {least} at least: east: no route; west: no route, exp"
        assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [rsh]


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.skipif(bool(missing()), reason="namespaces take root")
def test_a_host_is_gone_and_returns(tmp_path: Path) -> None:
    """The job goes on without it, and moves to it when it is back; each batch counts once."""
    give_an_address()
    (tmp_path / "hosts").mkdir()
    rsh = executable(tmp_path / "hosts" / "rsh", RSH)
    out, words = tmp_path / "out", counting_words(tmp_path, ENDLESS, "--servers", "2")
    mine = platform.node()
    options = ["--hosts", f"{mine}:2,west:2", "--elastic", "--rsh", str(rsh), "--timeout", "30"]

    def restarted(job: Supervised) -> list[int]:
        starts = starts_of(out)
        job.wait_for(lambda: starts_of(out) > starts)
        return job.wait_for_training(out, starts + 1)

    with Supervised(tmp_path, 4, words, *options) as job:
        assert len(job.wait_for_training(out, 1)) == 4
        if mpirun.is_open_mpi():
            os.kill(job.ranks()[3], signal.SIGSTOP)
            job.wait_for(lambda: "(rank 3 on west) has died; its " in job.output)
            assert starts_of(out) == 1
        crash(rsh, "west")
        assert len(restarted(job)) == 2
        assert f"2 of 4 ranks on {mine}:2 (west: no route to west) --servers=1" in job.output
        revive(rsh, "west")
        assert len(restarted(job)) == 4
        job.process.send_signal(signal.SIGTERM)
        told = job.wait(SAVED)
    (move,) = MOVE.finditer(told)
    assert "starting again" not in told[move.end() :]
    assert told.count(f"4 of 4 ranks on {mine}:2,west:2") == 1
    again = "starts again from its newest checkpoint: "
    counts = {"checkpoint: this MPI ends all ranks\n": 3}
    if mpirun.is_open_mpi():
        counts = {"if a worker dies, the others go on without it; if ": 3}
        counts |= {f"{again}each is alone on its node\n": 2, f"{again}it is the only one\n": 1}
    assert {text: told.count(text) for text in counts} == counts
    all_of_them = [mine, mine, "west", "west"]
    assert ROW.findall(told) == [*all_of_them, mine, mine, *all_of_them]
    assert_counts(newest(out), N)
