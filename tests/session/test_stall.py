"""Jobs that stand still: what is told of them, and that they end."""

import json
import os
import re
import signal
from pathlib import Path
from string import Template

from launch import Running, until
from runs import ENDLESS, counting, newest, samples_file, wait_for

from mpips.errors import UserError
from mpips.launch.ranks import ranks_table
from mpips.mpi.process import send_signal

WAIT_S = 60.0
PROGRAM = Template("""
import time
import numpy as np
import mpips
from mpi4py import MPI
def hangs():
    time.sleep(600)
def train(worker):
    for batch in worker.batches(1000, batch_size=5):
        worker.grads["x"][:] = 1
        $line
        worker.push(1.0)
mpips.run(train, {"x": np.zeros(8)}, mpips.SGD(0.1), out="$name", quiet=True, $options)
""")
HANGS = 'if worker.id == 1 and worker.pull()["x"][0] < -2: hangs()'
MEETS = 'print("in a barrier", flush=True); MPI.COMM_WORLD.barrier()'


def program(folder: Path, name: str, line: str, options: str) -> list[str]:
    (folder / f"{name}.py").write_text(PROGRAM.substitute(name=name, line=line, options=options))
    return [f"{name}.py"]


def test_a_worker_that_is_stopped(tmp_path: Path) -> None:
    """The others come to wait for its clock, what is applied is saved; an evaluator is shown."""
    out = tmp_path / "out"
    options = [*counting(samples_file(tmp_path, 230), kind="SlowCounting"), "--out", str(out)]
    options += ["--mode", "ssp", "--servers", "1", "--batch-size", "4", "--epochs", f"{ENDLESS}"]
    options += ["--checkpoint-every", "0", "--timeout", "3", "--evaluators", "1"]
    got_on = r"server 0 .* [1-9]\d+ +\d+ +\d(.*\n)+3 +evaluator 0 .* s +[1-9]\d* +- "
    with Running(4, ["-m", "mpips.train", *options], tmp_path) as job:
        wait_for(job, lambda: re.search(got_on, table(out)) is not None)
        seen = ranks_table(out)
        os.kill(json.loads((out / ".lock").read_text())[2][1], signal.SIGSTOP)
        until(lambda: "no progress" in job.output(), WAIT_S, job.output)
        done = job.wait(20)
    assert done.code, done.output
    assert re.search(r"1 +worker 0 .* waits for a clock \(rank 2\) +\S+ ", done.output), done.output
    assert re.search(r"2 +worker 1 .* and is stopped ", done.output), done.output
    assert re.search(
        r"3 +evaluator 0 .* (waits for an evaluation|reading a checkpoint|evaluating) ", seen
    ), seen
    saved = newest(out).step
    assert saved > 0
    assert f"step {saved} is saved" in done.output


def table(out: Path) -> str:
    """Return the table of a job's ranks; nothing before it has one."""
    try:
        return ranks_table(out)
    except (UserError, OSError):
        return ""


def test_programs_that_hang(tmp_path: Path) -> None:
    """In a function of theirs, and in a call of MPI in the loop that servers do not make."""
    function = program(tmp_path, "function", HANGS, 'mode="sync", timeout=3')
    barrier = program(tmp_path, "barrier", MEETS, 'mode="async", timeout=3')
    with Running(2, function, tmp_path) as one, Running(2, barrier, tmp_path) as other:
        function, barrier = (job.wait(WAIT_S).check(1).output for job in (one, other))
    assert re.search(r"0 +worker 0 .* waits for the round \(rank 1\) ", function), function
    assert re.search(r"1 +worker 1 .* hangs ", function), function
    assert re.search(r'rank 1:\n(.*\n)*  File ".*function.py", line \d+ in hangs', function)
    assert re.search(r"0 +server 0 .* serving +AsyncServer", barrier), barrier
    assert re.search(r"1 +worker 0 .* in a call of MPI by the program .* train ", barrier)


def test_a_second_sigterm_ends_a_job_that_cannot_save(tmp_path: Path) -> None:
    words = program(tmp_path, "barrier", MEETS, 'mode="async", timeout=0')
    with Running(2, words, tmp_path) as job:
        wait_for(job, lambda: "in a barrier" in job.output())
        rank = job.ranks()[1]

        def ended() -> bool:
            send_signal(rank, signal.SIGTERM)
            return job.process.poll() is not None

        until(ended, WAIT_S, job.output)
        done = job.wait(10)
    assert done.code, done.output
    assert "second SIGTERM after 3 s or more: the job ends without saving" in done.output
