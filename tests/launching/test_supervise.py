"""Jobs under a supervisor: ranks that die or hang, and what is left of them in the end."""

import os
import platform
import re
import shlex
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import ROOT, Running, ends_soon, executable, shown, until
from runs import (
    COUNTING,
    ENDLESS,
    SAVED,
    assert_counts,
    final,
    is_whole,
    list_checkpoints,
    newest,
    starts_of,
    summary,
    thinned,
    wait_until_training,
)
from supervised import N, Supervised, counting_words

from mpips.checkpoint.run_folder import is_claimed
from mpips.launch import mpirun
from mpips.launch.heartbeat import Terms
from mpips.launch.watch import Heartbeats
from tests.chaos.hosts import RSH, crash, give_an_address, missing, revive
from tests.chaos.job import Job

pytestmark = pytest.mark.launch
LEFT_OUT, TAKEN_OVER = "has died; its", "server 0 has taken its shard over"
DUTIES = "has taken its duties over"
HERE = '#!/bin/sh\nshift\nexec sh -c "$*"\n'  # as ssh without options
ENDING = {
    "the server": "rank 0 has died, expected all",
    "both servers": "ranks 0, 1 have died, expected all",
    "all workers": "every worker has died",
}


# Programs that count samples: what they have in common, and then what their workers do.
COUNTS = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from mpi4py import MPI
import mpips
N, TABLES = 230, {}
server = MPI.COMM_WORLD.bcast(os.getpid(), 0)
def count(worker, batch):
    worker.grads["counts"][:] = -np.bincount(batch.ids, minlength=N)
    for name in TABLES:
        worker.push_rows(name, batch.ids, -np.ones((len(batch), 2)))
    time.sleep(0.005)
    worker.push(0.0)
def run(train, epochs, **options):
    how = {"dtype": "float64", "tables": TABLES, "out": "out", "resume": "auto", **options}
    result = mpips.run(train, {"counts": np.zeros(N)}, mpips.SGD(1.0), **how)
    np.testing.assert_array_equal(result.params["counts"], epochs)
    for name in TABLES:
        np.testing.assert_array_equal(result.rows(name, range(N)), epochs)
    return result
"""
KILLS = """
def train(worker):
    for pushed, batch in enumerate(worker.batches(N, batch_size=7, epochs=3), 1):
        count(worker, batch)
        if pushed == 30 and not Path("killed").exists():
            while not list(Path("out").glob("checkpoints/*/index.h5")):
                time.sleep(0.01)
            Path("killed").touch()
            os.kill(server, signal.SIGKILL)
result = run(train, 3, checkpoint_every="5steps", quiet=True)
print("the program has seen the end", flush=True)
"""
# The same, where a spare is there, which needs no restart; each rank notes how it takes over.
WALK = f"""
sys.path.insert(0, {str(ROOT / "tests" / "support")!r})
from walks import Walk, paths
WAYS, TABLES = paths()["A takeover"], {{"a": mpips.Table(N, 2, mpips.Zeros())}}
walk = Walk(set(sum(WAYS, []))).__enter__()
"""
SPARE = COUNTS + WALK + KILLS.replace("quiet=", "servers=1, spares=1, quiet=")
SPARE += "if server != os.getpid(): print(*map(walk.follows, WAYS))\n"
EXIT = "sys.exit(result.code)\n"


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Supervised, int]]:
    """A job whose server is stopped, and the process: while it hangs, there are other tests."""
    folder = tmp_path_factory.mktemp("hanging")
    words = counting_words(folder, 12)
    with Supervised(folder, 3, words, "--timeout", "20") as job:
        server = job.wait_for_training(folder / "out", 1)[0]
        os.kill(server, signal.SIGSTOP)
        yield job, server


@pytest.mark.usefixtures("hanging")
def test_a_program_whose_server_is_killed(tmp_path: Path) -> None:
    """It goes on where it was, and nothing is lost or done twice; see the program."""
    (tmp_path / "program.py").write_text(COUNTS + KILLS + EXIT)
    launcher = shlex.join(mpirun.command(3, [])[:-3])  # as a user may say it
    with Supervised(tmp_path, 3, ["program.py"], "--mpirun", launcher) as job:
        told = job.wait(0)
        assert list(job.temporary.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {
        *("program.py", "out", "killed", "output.txt")
    }
    assert told.count("the program has seen the end") == 3
    assert told.count("starting again from step ") == 1
    assert starts_of(tmp_path / "out") == 2


RAISES = """
def train(worker):
    for pushed, batch in enumerate(worker.batches(N, batch_size=7, epochs=100)):
        if worker.id == 1 and pushed == 20:
            Path(os.environ["RAISED_AT"]).write_text(f"{time.monotonic()}")
            raise KeyError("a mistake of mine")
        count(worker, batch)
run(train, 100, log_every=0.05)
"""


@pytest.mark.usefixtures("hanging")
def test_an_exception_that_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All end soon, also where others could go on; one more attempt is made, and no other."""
    (tmp_path / "program.py").write_text(COUNTS + RAISES)

    def run(env: Mapping[str, str]) -> str:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        with Supervised(tmp_path, 4, ["program.py"], "--ft") as job:
            return job.wait(1)

    told = ends_soon(run, tmp_path)
    assert told.count("rank 2 raised KeyError: 'a mistake of mine', expected no exception") == 2
    assert told.count("Traceback") == 2, "nobody else shows where it was"
    assert shown(told)[-1] == "KeyError: 'a mistake of mine'"
    assert re.search(r"no further than step 0 in 2 attempts: giving up", told)
    assert told.count("ended with code 1; step ") == 3, "said when it comes, and in the report"


ONE, ALL = "MPI.COMM_WORLD.rank == 1", "True"
MISTAKE, REFUSAL = "KeyError('a mistake of mine')", "mpips.UserError('this', 'that')"


@pytest.mark.long
@pytest.mark.parametrize("raised", thinned([(MISTAKE, ONE), (REFUSAL, ALL)], [(MISTAKE, ONE)]))
def test_what_a_program_raises_outside_a_run(raised: tuple[str, str], tmp_path: Path) -> None:
    """On one rank, for which the others wait, or on all: the job ends, and it is said."""
    what, who = raised
    lines = ["from mpi4py import MPI", "import mpips", f"if {who}:", f"    raise {what}"]
    (tmp_path / "program.py").write_text("\n".join([*lines, "MPI.COMM_WORLD.Barrier()"]))
    with Supervised(tmp_path, 3, ["program.py"]) as job:
        told = job.wait(1 if what == MISTAKE else 2)
    assert told.count("mpips: program.py:4: this, expected that") == (what == REFUSAL)
    attempts = 2 * (what == MISTAKE)
    assert [told.count(text) for text in ("Traceback", "runpy")] == [attempts, 0]
    assert told.count("a mistake of mine") == 2 * attempts


@pytest.mark.usefixtures("hanging")
def test_a_job_is_asked_to_end_and_refused(tmp_path: Path) -> None:
    """By Ctrl-C: it is saved. It does not go on with another batch size."""
    out, words = tmp_path / "out", counting_words(tmp_path, ENDLESS)
    with Supervised(tmp_path, 3, words) as job:
        job.wait_for_training(out, 1)
        job.process.send_signal(signal.SIGINT)
        told = job.wait(SAVED)
    assert "mpips.launch: SIGINT: asking the ranks to save" in told
    assert "saved and not finished: the next start goes on from there" in told
    assert "--resume" not in told, "who starts it again needs no such word"
    assert_counts(newest(out), N)
    assert summary(out)["stop_reason"] == "SIGUSR1"
    with Supervised(tmp_path, 3, [*words, "--resume", "--batch-size", "5"]) as job:
        told = job.wait(2)
    assert "batch_size 5" in told
    assert "mpips.launch" not in told, "all is said"


def test_a_server_that_is_stopped(hanging: tuple[Supervised, int]) -> None:
    """It is found, and where the others wait for it; the run is complete and exact in the end."""
    job, server = hanging
    told = job.wait(0)
    assert f"rank 0 (process {server} on " in told
    assert told.count(" dies, this job starts again from its newest checkpoint: ") == 2
    assert re.search(r" is stopped for \d+ s: ending the job; where its ranks are:\n", told)
    assert re.search(r"\n.*: 0 +server 0 .* and is stopped ", told)
    for rank in (1, 2):
        assert re.search(rf"\n.*: {rank} +worker {rank - 1} .* waits for .* \(rank 0\) ", told)
        assert re.search(
            rf"rank {rank} \(process \d+ on .*:\nmpips.launch: (Current t|T)hread", told
        )
    assert re.search(r"waiting.py\", line \d+ in pause\n.*world.py\", line \d+ in wait", told)
    assert told.count("  is stopped\n") == 1
    out = job.folder / "out"
    assert starts_of(out) == 2
    assert_counts(final(out), N, 12)


def test_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    """Its job is asked to save, and ends."""
    out = tmp_path / "out"
    with Supervised(tmp_path, 3, counting_words(tmp_path, ENDLESS)) as job:
        job.wait_for_training(out, 1)
        job.process.kill()
        job.process.wait(10)
        job.assert_nothing_left(within_s=30)
    assert summary(out)["stop_reason"] == "SIGUSR1"
    assert_counts(newest(out), N)


def long(*values: object) -> Any:
    """Return parameters of a test that are among the long ones."""
    return pytest.param(*values, marks=pytest.mark.long)


survived = pytest.mark.skipif(
    not mpirun.survivors_launcher(), reason="this MPI ends jobs whose ranks die"
)


@survived
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("async", "--read consistent --trace"),
        ("async", "--node-size 2 --hidden 20000"),  # the last one alone on its node
        long("ssp", "--node-size 2"),
        long("async", "--servers 2 --eval-every 1"),
    ],
)
def test_workers_that_die_are_left_out(mode: str, options: str, tmp_path: Path) -> None:
    """The others go on, and each batch counts once; one that is stopped is ended by a limit."""
    out, words = tmp_path / "out", counting_words(tmp_path, 40, "--mode", mode, *options.split())
    limits = ("12", "300") if "--trace" in options else ("0", "12")
    with Supervised(tmp_path, 5, [*words, "--timeout", limits[1]], "--timeout", limits[0]) as job:
        *_, first, second = job.wait_for_training(out, 1)
        os.kill(first, signal.SIGKILL)
        job.wait_for(lambda: LEFT_OUT in job.output)
        os.kill(second, signal.SIGSTOP)
        told = job.wait(0)
    where = rf"rank 4, process {second} on {platform.node()}"
    assert len(re.findall(rf"warning: worker \d \({where}\) is stopped: ending it", told)) == 1
    s = assert_went_on(told, out, 40, [3, 4])
    assert [row.get("lost", False) for row in s["per_worker"]][-2:] == [True, True]
    assert lost(out, "rank") == [3, 4]


@survived
def test_the_lock_outlives_rank_0(tmp_path: Path) -> None:
    """It has locked the folder of the run for the coordinator, which is another rank."""
    out, words = tmp_path / "out", counting_words(tmp_path, 40, "--server-ranks", "1")
    with Supervised(tmp_path, 4, words) as job:
        os.kill(job.wait_for_training(out, 1)[0], signal.SIGKILL)
        job.wait_for(lambda: LEFT_OUT in job.output)
        assert is_claimed(out)
        assert_went_on(job.wait(0), out, 40, [0])


def lost(out: Path, kind: str) -> list[int]:
    """Return the numbers of those whose death a run has noted."""
    text = (out / "metrics.jsonl").read_text()
    return [int(k) for k in re.findall(rf'"kind": "lost", .*"{kind}": (\d)', text)]


def assert_went_on(told: str, out: Path, epochs: int, dead: list[int]) -> dict[str, Any]:
    """Assert that a job went on without these ranks and counted all once; returns its summary."""
    assert "starting again" not in told
    assert starts_of(out) == 1
    assert_counts(final(out), N, epochs)
    s = summary(out)
    assert s["lost"] == dead
    assert s["pushes_sent"] == s["pushes_applied"] == sum(s["steps"]) == s["global_step"]
    assert s["samples"] == epochs * N
    return s


@survived
def test_evaluators_and_others_that_die_are_left_out(tmp_path: Path) -> None:
    """Of each kind one, and an evaluator that is stopped: nothing starts again, all counts once."""
    out, more = tmp_path / "out", ("--evaluators", "2", "--eval-every", "1", "--servers", "2")
    words = counting_words(tmp_path, 60, *more, "--trace", "--keep-best")
    with Supervised(tmp_path, 7, words, "--timeout", "12") as job:
        _, server, *_, worker, first, second = job.wait_for_training(out, 1)
        os.kill(worker, signal.SIGKILL)
        job.wait_for(lambda: LEFT_OUT in job.output)
        os.kill(first, signal.SIGKILL)
        job.wait_for(lambda: "rank 5) has died; the others evaluate its share" in job.output)
        os.kill(server, signal.SIGKILL)
        job.wait_for(lambda: TAKEN_OVER in job.output)
        os.kill(second, signal.SIGSTOP)
        told = job.wait(0)
    assert told.count("is stopped: ending it") == 1
    lost_all = "nothing is evaluated any more, and the best checkpoint is no longer kept"
    assert f"rank 6) has died; {lost_all}" in told
    assert_went_on(told, out, 60, [1, 4, 5, 6])
    assert lost(out, "evaluator") == [0, 1]


# Worker 1 dies behind its fifth push, with batches in hand, when all have begun.
SURVIVES = """
import pytest
TABLES = {"rows": mpips.Table(N, 2, mpips.Zeros(), capacity="lazy")}
def means(params, batch):
    return {"loss": float(params["counts"][batch.ids].mean())}
def train(worker):
    begun = [Path(f"begun-{number}") for number in range(worker.workers)]
    begun[worker.id].touch()
    for pushed, batch in enumerate(worker.batches(N, batch_size=7, epochs=8), 1):
        count(worker, batch)
        if worker.id == 1 and pushed == 5:
            while not all(path.exists() for path in begun):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
    worker.log(left=worker.id)
    assert worker.evaluate(means, N) == {"loss": 8}
how = {"mode": sys.argv[1], "servers": 1, "quiet": True}
assert run(train, 8, **how).summary["lost"] == [2]
with pytest.raises(mpips.UserError, match="in which a worker has died"):
    run(train, 8, out="other", **how)
print(f"rank {MPI.COMM_WORLD.rank} is done", flush=True)
"""


@survived
@pytest.mark.parametrize("mode", ["async", long("ssp")])
def test_programs_whose_workers_die(mode: str, tmp_path: Path) -> None:
    """Those that live have the result, and all that the program does after its run."""
    (tmp_path / "program.py").write_text(COUNTS + SURVIVES)
    with Supervised(tmp_path, 4, ["program.py", mode], "--ft") as job:
        told = job.wait(0)
    assert sorted(re.findall(r"rank (\d) is done", told)) == ["0", "1", "3"]
    assert LEFT_OUT in told
    assert "starting again" not in told
    out = tmp_path / "out"
    assert summary(out)["command"] == f"python program.py {mode}"
    logged = re.findall(r'"left": (\d)', (out / "metrics.jsonl").read_text())
    assert sorted(logged) == ["0", "2"]


TOGETHER = """
def train(worker):
    batches = worker.batches(N, batch_size=7)
    for epoch in worker.epochs(6):
        for batch in batches:
            count(worker, batch)
            if worker.id == 1 and epoch == 2 and not Path("died").exists():
                Path("died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        assert worker.all_reduce(1, op="sum") == worker.workers
        worker.save(worker.pull()["counts"], "newest.npy")
    worker.save(worker.pull()["counts"], "last.npy")
    worker.print("counted on all of", worker.all_reduce(1, op="sum"))
result = run(train, 6)
"""


@survived
def test_what_workers_do_together_needs_all_of_them(tmp_path: Path) -> None:
    """One line says whom it lacks, and the job starts again; what it saved is whole."""
    (tmp_path / "program.py").write_text(COUNTS + TOGETHER + EXIT)
    with Supervised(tmp_path, 4, ["program.py"], "--ft") as job:
        told = job.wait(0)
    assert LEFT_OUT in told
    line = "all_reduce() of a number by sum without worker 1 (rank 2), which has died, expected"
    assert told.count(line) == 1, told
    assert ENDING["all workers"] not in told
    assert told.count("starting again") == 1
    assert told.count("counted on all of 3") == 1
    saved = {path.name for path in (tmp_path / "out").glob("*.npy*")}
    assert saved == {"newest.npy", "last.npy"}, "none is written in part"
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "last.npy"), 6)


SAVES = """
def half(file, array):
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
def train(worker):
    batches = worker.batches(N, batch_size=7)
    for epoch in worker.epochs(6):
        for batch in batches:
            count(worker, batch)
        if worker.id == 0 and epoch == 2:
            np.save = half
        worker.save(worker.pull()["counts"], "newest.npy")
        worker.print("saved epoch", epoch)
result = run(train, 6)
"""


@survived
def test_another_worker_saves_when_one_dies_in_the_middle_of_a_file(tmp_path: Path) -> None:
    """The file is whole: it is that of another worker, which prints from then on, too."""
    (tmp_path / "program.py").write_text(COUNTS + SAVES + EXIT)
    with Supervised(tmp_path, 4, ["program.py"], "--ft") as job:
        told = job.wait(0)
    assert LEFT_OUT in told
    assert "starting again" not in told
    assert [told.count(f"saved epoch {epoch}") for epoch in (0, 1, 5)] == [1, 1, 1]
    assert [path.name for path in (tmp_path / "out").glob("*.npy*")] == ["newest.npy"]
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "newest.npy"), 6)


ROWS = f"--mode async --problem {COUNTING}:SlowTableCounting --checkpoint-rows changed"
WIDE, STALL = "--mode ssp --hidden 200000", "--mode async --read consistent --snapshot stall"
SSP_NODES, NODES = "--mode ssp --node-size 3 --servers", "--mode async --node-size 3 --servers"
# Who dies first, the others, and which servers then serve the shards of 0, 1, ....
SERVERS, COORDINATORS = (1, (2, 3), [None, 0, 0]), (0, (1, 3), [2, 2, None])
REMOTE_AND_COORDINATOR = (4, (0, 5), [1, None, None, 2])


@survived
@pytest.mark.parametrize(
    ("options", "first", "others", "taken_over_by"),
    [
        (ROWS, *SERVERS),
        (ROWS, *COORDINATORS),
        ("--mode async", *SERVERS),
        long("--mode async", *COORDINATORS),
        long(WIDE, *SERVERS),
        long(STALL, *COORDINATORS),
        (f"{SSP_NODES} 4", *REMOTE_AND_COORDINATOR),
        long(f"{NODES} 4 --hidden 400000", *REMOTE_AND_COORDINATOR),
        long(f"{SSP_NODES} 4 --codec fp16 --hidden 20000", *REMOTE_AND_COORDINATOR),
        long(f"{NODES} 2 --spares 2 --read consistent", 3, (0, 5), [2, 3, None, None]),
    ],
)
def test_servers_that_die(
    options: str, first: int, others: Sequence[int], taken_over_by: list[int | None], tmp_path: Path
) -> None:
    """Others serve their shards, assign and save; a worker dies as well. None starts again."""
    out, words = tmp_path / "out", counting_words(tmp_path, 20, "--servers", "3", *options.split())
    mark = DUTIES if first == 0 else TAKEN_OVER if first == 1 else "has taken its "
    with Supervised(tmp_path, 6, words) as job:
        pids = job.wait_for_training(out, 1)
        os.kill(pids[first], signal.SIGKILL)
        job.wait_for(lambda: mark in job.output)
        for rank in others:
            os.kill(pids[rank], signal.SIGKILL)
        told = job.wait(0)
    assert told.count(mark) == 2
    dead = sorted([first, *others])
    s = assert_went_on(told, out, 20, dead)
    assert {row["applied"] for row in s["per_server"] if row["bytes"]} == {s["global_step"]}
    assert [row.get("taken_over_by") for row in s["per_server"]] == taken_over_by
    assert set(lost(out, "rank")) == set(dead)


# Server 0 dies in an update by worker 1, and so does that one; worker 0 of its node waits to read.
RESENDS = """
pids, begun = MPI.COMM_WORLD.allgather(os.getpid()), []
def rate(step):
    begun.extend([step] * (server == os.getpid() and Path("held").exists()))
    if len(begun) > 9:
        Path("dead").touch()
        for pid in (pids[3], server):
            os.kill(pid, signal.SIGKILL)
    return 1.0
def train(worker):
    for pushed, batch in enumerate(worker.batches(N, batch_size=7, epochs=8), 1):
        count(worker, batch)
        if worker.id == 0 and pushed == 5:
            Path("held").touch()
            while not Path("dead").exists():
                time.sleep(0.001)
mpips.SGD.rate_schedule = property(lambda rule: rate)
result = run(train, 8, server_ranks=[0, 1], node_size=2, quiet=True)
"""


@survived
def test_a_worker_resends_while_it_waits(tmp_path: Path) -> None:
    """The shard is read only when the update is whole: its server needs the push for that."""
    (tmp_path / "program.py").write_text(COUNTS + RESENDS + EXIT)
    with Supervised(tmp_path, 4, ["program.py"], "--ft") as job:
        told = job.wait(0)
    assert "starting again" not in told
    assert summary(tmp_path / "out")["lost"] == [0, 3]


@survived
def test_a_spare_goes_on_for_the_only_server(tmp_path: Path) -> None:
    """It assigns, saves, and ends the run, by the call paths of the design page."""
    (tmp_path / "program.py").write_text(SPARE + EXIT)
    with Supervised(tmp_path, 4, ["program.py"], "--ft") as job:
        told = job.wait(0)
    counts = {"the program has seen the end": 3, DUTIES: 1, "True True": 1, "starting again": 0}
    assert {text: told.count(text) for text in counts} == counts
    s = summary(tmp_path / "out")
    assert (s["lost"], s["samples"]) == ([0], 3 * N)
    assert s["per_server"][0]["taken_over_by"] == 1


@pytest.mark.long
@survived
@pytest.mark.parametrize("who", ["the server", "both servers", "all workers"])
def test_a_death_that_ends_a_job_that_goes_on_without_workers(who: str, tmp_path: Path) -> None:
    """It is said once, and the job starts again, also where workers wait for a push's rows."""
    tables = ["--servers", "2", "--problem", f"{COUNTING}:SlowTableCounting"]
    out = tmp_path / "out"
    words = counting_words(tmp_path, 40, *(tables if who == "both servers" else ()))
    with Supervised(tmp_path, 4, words) as job:
        ranks = job.wait_for_training(out, 1)
        servers = 2 if who == "both servers" else 1
        for pid in ranks[servers:] if who == "all workers" else ranks[:servers]:
            os.kill(pid, signal.SIGKILL)
        told = job.wait(0)
    assert told.count("starting again") == 1
    assert re.search(r"attempt 1: .* ended with code 137; ", told), "no exception of the program's"
    assert told.count(ENDING[who]) == 1
    assert_counts(final(out), N, 40)


@survived
@pytest.mark.parametrize(
    ("mode", "dead"), [("async", (0,)), ("sync", (1,)), ("ssp", (0, 1)), ("async", (0, 1, 3))]
)
def test_a_job_that_cannot_go_on_fails(mode: str, dead: Sequence[int], tmp_path: Path) -> None:
    """Without a supervisor it ends soon, by 137, as after a kill; one of those left says why."""
    words = f"-m mpips.train --mode {mode} --epochs 100000 --checkpoint-every 0.3 --out out"
    with Running(4, words.split(), tmp_path, launcher=mpirun.survivors_launcher()) as job:
        wait_until_training(job, tmp_path / "out", 1)
        ranks = job.ranks()
        for rank in dead:
            os.kill(ranks[rank], signal.SIGKILL)
        done = job.wait(20)
    done.check(137)
    assert done.output.count("died, expected all that this job needs") == 1


@pytest.mark.skipif(bool(mpirun.survivors_launcher()), reason="this MPI lets ranks go on")
def test_an_mpi_that_ends_all_ranks_says_so_before_the_first_step(tmp_path: Path) -> None:
    """Where none dies in vain: a job that is to go on without workers is refused there."""
    words = ["--mode", "sync", "--out", "out", "--epochs", "1"]
    with Supervised(tmp_path, 2, [*words, "--on-death", "shrink"]) as job:
        told = job.wait(2)
    assert "on_death 'shrink' where this MPI ends all ranks, expected 'restart'; start it" in told
    assert not (tmp_path / "out").exists()
    with Supervised(tmp_path, 2, words) as job:
        told = job.wait(0)
    says = "if a rank dies, this job starts again from its newest checkpoint: mode sync needs"
    assert told.index(says) < told.index("step ")


@pytest.mark.long
def test_a_second_interrupt_ends_a_job_at_once(tmp_path: Path) -> None:
    """One that hangs, say, and does not save."""
    out = tmp_path / "out"
    with Supervised(tmp_path, 3, counting_words(tmp_path, ENDLESS)) as job:
        os.kill(job.wait_for_training(out, 1)[0], signal.SIGSTOP)
        for _ in range(2):
            job.process.send_signal(signal.SIGINT)
            time.sleep(1)
        told = job.wait(1, timeout_s=20)
    assert f"SIGINT, and it has not saved; step {newest(out).step} was saved before" in told
    assert "where its ranks are" not in told


HANGS = """
from mpi4py import MPI
def wait_for_ever():
    MPI.COMM_WORLD.recv()
def wait_for_others():
    MPI.COMM_WORLD.Barrier()
MPI.COMM_WORLD.Barrier()
wait_for_ever() if MPI.COMM_WORLD.rank == 1 else wait_for_others()
"""


@pytest.mark.long
def test_ranks_of_other_hosts_are_asked_through_mpirun(tmp_path: Path) -> None:
    """Which hands the signal on, to those that are stuck in MPI as well."""
    program = tmp_path / "program.py"
    program.write_text(HANGS)
    job = Heartbeats(tmp_path / "signs")
    job.begin(Terms())
    with mpirun.Running(
        3, ["-m", "mpips.launch.rank", str(job.folder), str(program)], tmp_path
    ) as w:
        until(lambda: job.read() or len(job.ranks) == 3, told=w.output)
        time.sleep(3)  # MPI starts
        job.ranks = [rank._replace(host="elsewhere") for rank in job.ranks]
        told = job.ask_for_stacks(w.process.pid, 20)
    assert "does not answer" not in told
    assert told.count("in wait_for_ever") == told.count("in wait_for_others") == 1


MOVE = re.compile(
    "answering again: west; on 4 ranks instead of 2 the run would end about [0-9]{3,} s earlier, "
    "a restart costs [0-9]+ s: saving to move there"
)
ROW = re.compile(r"^ +\d+ +\d+  (\S+) +(?:server|worker) \d+ ", re.M)  # of a rank, at a start


@pytest.mark.long
def test_a_start_of_slurm_after_one_on_a_node_that_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that still run there end, and keep the new ones from nothing."""
    out, words = tmp_path / "out", counting_words(tmp_path, ENDLESS, "--resume", "auto")
    hosts = ["--hosts", f"{platform.node()}:3", "--rsh", str(executable(tmp_path / "rsh", HERE))]
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    (tmp_path / "lost").mkdir()
    with Job(tmp_path / "lost", 3, words, hosts, tmp_path) as lost:
        until(lambda: any(map(is_whole, list_checkpoints(out))), told=lambda: lost.output)
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        with Supervised(tmp_path, 3, words, *hosts) as job:
            job.wait_for_training(out, 2)
            job.process.send_signal(signal.SIGINT)
            job.wait_for(lambda: job.is_over)
            assert job.process.returncode == SAVED, job.output
    assert_counts(newest(out), N)


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
