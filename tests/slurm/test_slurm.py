"""The job scripts on a real SLURM: jobs train, are stopped, go on, and finish."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launch import ROOT, until
from runs import MODELS, assert_same_state, final, list_checkpoints, newest, summary
from slurm_cluster import SlurmCluster

from mpips.checkpoint.run_folder import read_ranks
from mpips.launch.mpirun import is_open_mpi

pytestmark = [pytest.mark.launch, pytest.mark.long, pytest.mark.slurm]
SCRIPTS = ROOT / "slurm"
TRAIN = str(SCRIPTS / "train.sbatch")
LAUNCHERS = ("srun", "mpirun")
TWO_BY_TWO = ("--nodes=2", "--ntasks-per-node=2", "--mem-per-cpu=600M", "--time=5")
# 90 rounds an epoch, of 0.2 s while a file called hold is there; `mlp` does the same without.
SYNC = ("--mode", "sync", "--batch-size", "4", "--hidden", "16", "--eval-every", "0")
HELD = ("--problem", f"{MODELS}:HeldMLP", *SYNC, "--checkpoint-every", "1")
TEN = ("--epochs", "10", "--seed", "3")
HOLDS = "bitwise equality with an uninterrupted run holds"


class Submitted:
    """A job in the queue, its log and its run."""

    def __init__(self, slurm: SlurmCluster, folder: Path, *words: str, launcher: str = "srun"):
        self.slurm, self.folder = slurm, folder
        self.id = slurm.submit(f"--export=ALL,LAUNCHER={launcher}", *words, cwd=folder)
        self.out = folder / "runs" / f"mpips-{self.id}"

    def log(self) -> str:
        path = self.folder / f"mpips-{self.id}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_until_requeued(self, restarts: int = 1) -> None:
        until(lambda: self.slurm.show(self.id).get("Restarts") == f"{restarts}", 90, self.told)

    def wait_until_saved(self, restarts: int = 0) -> None:
        """Wait until it has gone on so often, and has saved more than it began with."""

        def saved() -> bool:
            steps = self.resumed_steps()
            return len(steps) == restarts and newest_step(self.out) > max(steps, default=0)

        until(saved, 120, self.told)

    def wait(self, state: str = "COMPLETED", timeout_s: float = 150) -> dict[str, str]:
        """Wait for the end, which must be `state`; returns what SLURM says of the job."""
        found = self.slurm.wait(self.id, timeout_s, self.log)
        assert found == state, self.told()
        return self.slurm.show(self.id)

    def resumed_steps(self) -> list[int]:
        """Return the steps at which its runs went on."""
        return [int(s) for s in re.findall(r"resumed at step (\d+)", self.log())]

    def told(self) -> str:
        return f"{self.slurm.show(self.id)}\n{self.log()}\n{self.slurm.logs()}"


def newest_step(out: Path) -> int:
    """Return the step of the newest committed checkpoint, -1 if there is none."""
    whole = [p for p in list_checkpoints(out) if (p / "index.h5").exists()]
    return int(whole[-1].name.partition("-")[2]) if whole else -1


@pytest.mark.parametrize("launcher", [LAUNCHERS[-1 if is_open_mpi() else 0]])
def test_a_job_that_is_stopped_again_and_again(
    launcher: str, slurm: SlurmCluster, tmp_path: Path, hold: Path
) -> None:
    """By an urgent job, the time limit, a crashed node, scancel: as if nothing had happened."""
    words = (*TWO_BY_TWO, "-w", "n1,n2", "--signal=B:USR1@40", TRAIN, *HELD, *TEN)
    job = Submitted(slurm, tmp_path, *words, launcher=launcher)
    job.wait_until_saved()
    urgent = ("-p", "urgent", "-N3", "--exclusive", "-t1", "-o", "/dev/null", "--wrap", "sleep 1")
    assert slurm.wait(slurm.submit(*urgent, cwd=tmp_path), 60, job.told) == "COMPLETED"
    job.wait_until_saved(restarts=1)
    slurm.ask("scontrol", "update", f"jobid={job.id}", "EndTime=now+45")
    job.wait_until_requeued(2)
    slurm.ask("scontrol", "update", f"jobid={job.id}", "TimeLimit=5")
    job.wait_until_saved(restarts=2)
    asked = [int(step) for step in re.findall(r"step (\d+) is saved", job.log())]
    assert job.resumed_steps() == asked
    assert asked[0] > 0
    try:
        slurm.crash("n2")
        job.wait_until_requeued(3)
    finally:
        slurm.wait_idle()
    job.wait_until_saved(restarts=3)
    assert "cancelled;" not in job.log()
    slurm.ask("scancel", job.id)
    assert job.wait("CANCELLED", 30)["Restarts"] == "3"
    hold.unlink()
    step = newest(job.out).step
    after = Submitted(slurm, tmp_path, *TWO_BY_TWO, TRAIN, *HELD, *TEN, "--out", str(job.out))
    whole = Submitted(slurm, tmp_path, *TWO_BY_TWO, TRAIN, *SYNC, *TEN)
    after.wait()
    whole.wait()
    assert after.resumed_steps() == [step]
    assert HOLDS in job.log()
    assert np.isfinite(final(job.out).read_params()).all()
    assert_same_state(final(whole.out), final(job.out))
    assert (job.out / "DONE").exists()


def test_crashed_node_of_an_allocation(slurm: SlurmCluster, tmp_path: Path, hold: Path) -> None:
    """With --no-kill the job is not requeued: it goes on with the ranks of the other nodes."""
    launcher, mode = ("mpirun", "async") if is_open_mpi() else ("srun", "sync")
    words = ("--nodes=3", "--ntasks-per-node=2", "--mem-per-cpu=600M", "--time=15", "--no-kill")
    names = ("-w", "n1,n2,n3", f"--export=ALL,LAUNCHER={launcher},MPIPS_ELASTIC=3")
    job = Submitted(slurm, tmp_path, *words, *names, TRAIN, *HELD, *TEN, "--mode", mode)
    job.wait_until_saved()
    if launcher == "mpirun":
        os.kill(read_ranks(job.out)[5][1], signal.SIGKILL)
        until(lambda: "(rank 5 on n3) has died; its " in job.log(), 30, job.told)
        assert not job.resumed_steps()
    try:
        slurm.crash("n2")
        until(lambda: bool(job.resumed_steps()), 120, job.told)
        hold.unlink()
        assert job.wait()["Restarts"] == "0"
    finally:
        slurm.wait_idle()
    assert job.resumed_steps()[0] > 0
    assert re.search(r"4 of 6 ranks on n1:2,n3:2 \(n2: ", job.log())
    found = summary(job.out)
    assert {node["host"]: len(node["ranks"]) for node in found["nodes"]} == {"n1": 2, "n3": 2}
    assert (job.out / "DONE").exists()


@pytest.mark.parametrize("launcher", [LAUNCHERS[-1 if is_open_mpi() else 0]])
def test_an_allocation_that_grows(
    launcher: str, slurm: SlurmCluster, tmp_path: Path, hold: Path
) -> None:
    """The job moves to the node that it is given, and makes no step twice."""
    words = ("--ntasks-per-node=2", "--mem-per-cpu=600M", "--time=15")
    export = f"--export=ALL,LAUNCHER={launcher},MPIPS_ELASTIC=2"
    each = ("--nodes=1", "-w", "n1", "--no-kill", export, TRAIN, *HELD, "--epochs", "3")
    job = Submitted(slurm, tmp_path, *words, *each)
    job.wait_until_saved()
    slurm.grow(job.id, *words, "--nodes=1", "-w", "n3")
    until(lambda: bool(job.resumed_steps()), 120, job.told)
    hold.unlink()
    assert job.wait()["Restarts"] == "0"
    assert "answering again: n3; on 4 ranks instead of 2 the run would end" in job.log()
    (moved,) = job.resumed_steps()
    assert f"ended: SIGUSR1 at step {moved}," in job.log()
    found = summary(job.out)
    assert {node["host"]: len(node["ranks"]) for node in found["nodes"]} == {"n1": 2, "n3": 2}
    assert (job.out / "DONE").exists()


def test_jobs_that_are_not_tried_again(slurm: SlurmCluster, tmp_path: Path) -> None:
    """What the ranks refuse ends the job with its message and its code."""
    right, wrong = ("pmix", ("none", "pmi2")) if is_open_mpi() else ("pmi2", ("none",))
    got = "a world of 1 rank in a SLURM step of 4 tasks, expected a world of 4"
    refused = Submitted(slurm, tmp_path, *TWO_BY_TWO, TRAIN, "--servers", "4")
    jobs = {refused: "servers=4 leaves no worker in a world of 4"}
    for plugin in wrong:
        line = f"srun --mpi={plugin} python -m mpips.train --epochs 1 --out wrong"
        words = (*TWO_BY_TWO, "--job-name=mpips", "--output=%x-%j.out", "--wrap", line)
        jobs[Submitted(slurm, tmp_path, *words)] = f"mpips: {got}; use srun --mpi={right}\n"
    for job, message in jobs.items():
        ended = job.wait("FAILED")
        assert ended["Restarts"] == "0"
        assert message in job.log(), job.told()
        assert job is not refused or ended["ExitCode"] == "2:0", job.told()
    assert not (tmp_path / "wrong").exists()


@pytest.mark.one_mpi
def test_scripts_are_clean(slurm: SlurmCluster) -> None:
    """For shellcheck, for sbatch, and in what sbatch lets through; as the guide submits them."""
    scripts = sorted(SCRIPTS.glob("*.sbatch"))
    assert scripts
    for script in scripts:
        slurm.ask("sbatch", "--test-only", str(script))
        lines = script.read_text().splitlines()
        assert lines[0] == "#!/bin/bash"
        first = next(k for k, line in enumerate(lines) if line and not line.startswith("#"))
        found = [k for k, line in enumerate(lines) if re.match(r"#+ ?SBATCH", line)]
        assert max(found) < first, f"{script}: a directive after the first command is ignored"
        assert not [k for k in found if not re.match(r"#SBATCH (hetjob$|--[^$]+$)", lines[k])]
    files = [*scripts, *SCRIPTS.glob("*.sh"), *SCRIPTS.glob("*.example")]
    slurm.ask("shellcheck", "-x", "-P", "SCRIPTDIR", *map(str, files))
    text = (ROOT / "mpips" / "tools" / "guide" / "slurm.md").read_text()
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S))
    told = re.findall(r"^(?:for link in 1 2 3; do )?(sbatch .*?)(?:; done)?$", blocks, re.M)
    assert len(told) == 6
    assert {s.name for s in scripts} <= set(re.findall(r"\w+\.sbatch", text))
    for line in told:
        words = shlex.split(line.replace("--constraint=bigmem", "--constraint=big"))
        slurm.ask("sbatch", "--test-only", *words[1:], cwd=ROOT)
        assert all((ROOT / w).is_file() for w in words if w.startswith(("slurm/", "jobs/"))), line


@pytest.mark.one_mpi
def test_sweep(slurm: SlurmCluster, tmp_path: Path, hold: Path) -> None:
    """A run for each row; one that is stopped goes on alone, one refused is in the results."""
    (tmp_path / "table").write_text("# three\n--lr -1\n--lr 0.001 --seed 1\n\n--lr 0.01\n")
    words = ("--array=1-3", "--ntasks-per-node=2", "--mem-per-cpu=600M", f"{SCRIPTS}/sweep.sbatch")
    job = (f"{ROOT}/jobs/digits.toml", "table", *HELD, "--epochs", "2", "--quiet")
    array = slurm.submit(*words, *job, cwd=tmp_path)
    folder = tmp_path / "runs" / f"sweep-{array}"

    def told() -> str:
        return "\n".join(path.read_text() for path in tmp_path.glob("sweep-*.out"))

    until(lambda: newest_step(folder / "2") > 0 < newest_step(folder / "3"), 90, told)
    slurm.ask("scancel", "--batch", "-s", "USR1", f"{array}_3")
    until(lambda: slurm.show(f"{array}_3").get("Restarts") == "1", 60, told)
    hold.unlink()
    ends = {"1": ("FAILED", "0"), "2": ("COMPLETED", "0"), "3": ("COMPLETED", "1")}
    for k, end in ends.items():
        state = slurm.wait(f"{array}_{k}", 90, told)
        assert (state, slurm.show(f"{array}_{k}")["Restarts"]) == end, told()
    head, failed, *rows = (folder / "results.txt").read_text().splitlines()
    assert failed.startswith("1    failed (exit code 2)")
    assert head.split()[:3] + head.split()[-2:] == ["run", "state", "step", "seed", "lr"]
    assert [row.split()[-2:] for row in rows] == [["1", "0.001"], ["0", "0.01"]]
    assert [row.split()[:2] for row in rows] == [["2", "done"], ["3", "done"]]
    assert (folder / "report.html").exists(), told()
    steps = [summary(folder / k)["global_step"] for k in "23"]
    assert [float(row.split()[2]) for row in rows] == steps


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_het(launcher: str, slurm: SlurmCluster, tmp_path: Path, hold: Path) -> None:
    """Servers on the big node, workers on the small ones, one world; requeued as a whole."""
    components = ("--ntasks-per-node=1", "--constraint=big", ":", "--constraint=small")
    components += ("--nodes=2", "--ntasks-per-node=2", "--mem-per-cpu=600M")
    options = ("--problem", f"{MODELS}:HeldMLP", "--checkpoint-every", "1", "--epochs", "10")
    script = str(SCRIPTS / "het.sbatch")
    job = Submitted(slurm, tmp_path, *components, script, *options, launcher=launcher)
    job.wait_until_saved()
    slurm.ask("scancel", "--batch", "-s", "USR1", job.id)
    job.wait_until_requeued()
    hold.unlink()
    job.wait()
    plugin = "pmix" if is_open_mpi() else "pmi2"
    assert (f"by srun --mpi={plugin}" if launcher == "srun" else "by mpirun") in job.log()
    found = summary(job.out)
    assert (found["world"], found["servers"]) == (5, 1)
    nodes = [(node["host"], node["ranks"]) for node in found["nodes"]]
    assert nodes == [("n1", [0]), ("n2", [1, 2]), ("n3", [3, 4])]
    assert re.search(r"0 +0 +n1 +server 0", job.log())
    assert job.resumed_steps()[0] > 0
    assert (job.out / "DONE").exists()
    assert (job.out / "report.html").exists(), job.log()


@pytest.mark.one_mpi
def test_script_from_a_job_file(slurm: SlurmCluster, tmp_path: Path) -> None:
    """It trains with the memory and time that it asks for."""
    command = ["-m", "mpips", "sbatch", f"{ROOT}/jobs/digits.toml", "--epochs", "2", "--nodes", "2"]
    text = subprocess.check_output(
        [sys.executable, *command, "--job-name", "mpips"], env=slurm.env, text=True, timeout=60
    )
    (tmp_path / "my.sbatch").write_text(text)
    assert re.search(r"^#SBATCH --mem-per-cpu=\d+M$", text, re.M)
    slurm.ask("shellcheck", str(tmp_path / "my.sbatch"))
    line = "sbatch --parsable --output=log < my.sbatch"  # the controller does not know its name
    job = slurm.ask("bash", "-c", line, cwd=tmp_path).strip()
    log = tmp_path / "log"
    assert slurm.wait(job, 150, log.read_text) == "COMPLETED", log.read_text()
    out = tmp_path / "runs" / f"mpips-{job}"
    assert summary(out)["world"] == 8
    assert (out / "DONE").exists()
