"""The other job scripts on a real SLURM: a sweep, a heterogeneous job, a chain."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT, executable, until
from runs import MODELS, newest, summary
from slurm_cluster import SlurmCluster
from slurm_jobs import HELD, LAUNCHERS, SCRIPTS, TEN, TWO_BY_TWO, Submitted, newest_step

pytestmark = [pytest.mark.launch, pytest.mark.long, pytest.mark.slurm]


@pytest.mark.one_mpi
def test_scripts_are_clean(slurm: SlurmCluster) -> None:
    """For shellcheck, for sbatch, and in what sbatch lets through."""
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
    shellcheck = shutil.which("shellcheck")
    assert shellcheck, "install shellcheck"
    files = [*scripts, *SCRIPTS.glob("*.sh"), *SCRIPTS.glob("*.example")]
    command = [shellcheck, "-x", "-P", "SCRIPTDIR", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


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
    found = summary(job.out)
    assert found["world"] == 5
    assert found["servers"] == 1
    assert found["nodes"] == [
        {"host": "n1", "ranks": [0]},
        {"host": "n2", "ranks": [1, 2]},
        {"host": "n3", "ranks": [3, 4]},
    ]
    assert re.search(r"0 +0 +n1 +server 0", job.log())
    assert job.resumed_steps()[0] > 0
    assert (job.out / "DONE").exists()


@pytest.mark.one_mpi
def test_chain(slurm: SlurmCluster, tmp_path: Path, hold: Path) -> None:
    """Each link goes on from the one before, and one that comes too late has nothing to do."""
    words = ("--job-name=mpips", "--output=%x-%j.out", *TWO_BY_TWO, str(SCRIPTS / "chain.sbatch"))
    links = [Submitted(slurm, tmp_path, *words, *HELD, *TEN) for _ in range(3)]
    out = tmp_path / "runs" / "mpips"
    until(lambda: newest_step(out) > 0, 90, links[0].told)
    slurm.ask("scancel", "--batch", "-s", "USR1", links[0].id)
    links[0].wait()
    hold.unlink()
    assert not (out / "DONE").exists()
    saved = [int(s) for s in re.findall(r"step (\d+) is saved", links[0].log())]
    for link in links[1:]:
        link.wait()
    assert links[1].resumed_steps() == saved
    assert "runs/mpips is done" in links[2].log()
    assert newest(out).step == summary(out)["global_step"] == 900


@pytest.mark.one_mpi
def test_lines_of_the_guide(slurm: SlurmCluster) -> None:
    """What the guide tells to submit names files that are there, and options that sbatch knows."""
    text = (ROOT / "mpips" / "tools" / "guide" / "slurm.md").read_text()
    lines = [
        line.removeprefix("for link in 1 2 3; do ").removesuffix("; done")
        for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
        for line in block.splitlines()
        if re.search(r"(^|do )sbatch ", line)
    ]
    assert len(lines) == 6
    assert {s.name for s in SCRIPTS.glob("*.sbatch")} <= set(re.findall(r"\w+\.sbatch", text))
    for line in lines:
        words = shlex.split(line.replace("--constraint=bigmem", "--constraint=big"))
        assert words[0] == "sbatch"
        slurm.ask("sbatch", "--test-only", *words[1:], cwd=ROOT)
        assert all((ROOT / w).is_file() for w in words if w.startswith(("slurm/", "jobs/"))), line


@pytest.mark.one_mpi
def test_script_from_a_job_file(slurm: SlurmCluster, tmp_path: Path) -> None:
    """It trains with the memory and time that it asks for; one that only evaluates ends at once."""
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
    options = (f"{ROOT}/jobs/digits.toml", "--eval-only", "--init-from", str(out))
    second = Submitted(slurm, tmp_path, *TWO_BY_TWO, str(SCRIPTS / "train.sbatch"), *options)
    assert second.wait()["Restarts"] == "0"
    assert re.search(r"on 359 held-out samples: accuracy 0\.\d+, loss", second.log())


DIES_ONCE = """
ulimit -S -s 1000    # of which the doctor warns
export PATH=$PWD/bin:$PATH
"""
SRUN = """#!/bin/bash
case $* in
    *mpips.launch.rank*) if mkdir died; then kill -ABRT $$; fi ;;
esac
exec {srun} "$@"
"""


def test_ranks_that_die_at_the_start_are_started_once_more(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """By mpirun, as SLURM's pmi2 plugin may cut what MPICH tells it; a doctor's warning is 3."""
    shutil.copytree(SCRIPTS, tmp_path / "slurm")
    (tmp_path / "slurm" / "site.sh").write_text(DIES_ONCE)
    (tmp_path / "bin").mkdir()
    executable(tmp_path / "bin" / "srun", SRUN.format(srun=shutil.which("srun")))
    own = str(tmp_path / "slurm" / "doctor.sbatch")
    words = ("--job-name=mpips", *TWO_BY_TWO, own, "--json", "found.json", "--limit", "60")
    job = Submitted(slurm, tmp_path, *words)
    found = job.wait("FAILED")
    assert (found["Restarts"], found["ExitCode"]) == ("0", "3:0")
    assert "no run began" in job.log()
    other = "mpiexec.hydra" in job.log()
    assert other is ("--mpi=pmi2" in job.log()), job.log()
    assert json.loads((tmp_path / "found.json").read_text())["world"].startswith("4 ranks on")


WAITS_ONCE = """
import os
import time

if "PMI_FD" in os.environ and os.environ["PMI_RANK"] == "0" and not os.path.exists("sent"):
    open("sent", "w").close()
    slurm = int(os.environ["PMI_FD"])
    os.write(slurm, b"cmd=init pmi_version=1 pmi_subversion=1\\n")
    os.read(slurm, 1024)
    os.write(slurm, b"cmd=put kvsname=1.0 key=mine value=" + b"3E" * 512 + b"\\n")
    time.sleep(600)
"""


@pytest.mark.one_mpi
def test_ranks_that_wait_at_the_start_are_started_once_more(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """A rank whose address the plugin has cut may wait for an answer, and all others for it."""
    (tmp_path / "sitecustomize.py").write_text(WAITS_ONCE)
    path = f"PYTHONPATH={tmp_path}:{slurm.env.get('PYTHONPATH', '')}"
    script = (f"--export=ALL,LAUNCHER=srun,{path}", str(SCRIPTS / "train.sbatch"))
    words = ("--job-name=mpips", *TWO_BY_TWO, *script, "--problem", "softmax", "--epochs", "1")
    job = Submitted(slurm, tmp_path, *words)
    assert job.wait()["Restarts"] == "0"
    assert "pmi2 plugin could not read the address of a rank: ending the job" in job.log()
    assert job.log().count("no rank got as far as to begin: starting by ") == 1
