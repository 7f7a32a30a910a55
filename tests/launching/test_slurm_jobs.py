"""What the launcher knows of a job of SLURM, without one: its hosts, and what its steps say."""

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from launch import environment, executable

from mpips.errors import UserError
from mpips.launch import slurm
from mpips.launch.hosts import Host, find_hosts, launcher_words, placed
from mpips.launch.returned import find_again


@pytest.mark.parametrize(
    ("hosts", "tasks", "told"),
    [
        ("a:2,b:2", 4, "--nodes=2 --nodelist=a,b --ntasks-per-node=2 --overlap --ntasks=4"),
        ("a:2,b:1", 3, "--nodes=2 --overlap --ntasks=3"),
        ("a:2,b:1", 5, "--nodes=2 --nodelist=a,a,b --distribution=arbitrary --overlap --ntasks=3"),
    ],
)
def test_what_srun_is_told(
    hosts: str, tasks: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM places ranks where it can: with an arbitrary distribution pmi2 sees no nodes."""
    monkeypatch.setenv("SLURM_NTASKS", str(tasks))
    words = launcher_words(["/bin/srun", "-K1"], find_hosts(hosts, None), Path("/there/agent"))
    assert words == ["/bin/srun", "-K1", *told.split()]


def be_in_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, **known: str) -> None:
    """Be in an allocation whose variables are known, with a scontrol that lists its nodes."""
    executable(folder / "scontrol", '#!/bin/sh\necho "$3" | tr , "\\n"\n')
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")
    for name, value in known.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


def test_the_hosts_of_an_allocation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(UserError, match="--hosts slurm outside a job"):
        find_hosts("slurm", None)
    be_in_slurm(tmp_path, monkeypatch, JOB_NODELIST="n1,n2,n3,n4", TASKS_PER_NODE="2(x3),1")
    assert " ".join(map(str, find_hosts("slurm", None))) == "n1:2 n2:2 n3:2 n4:1"
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x3)")
    with pytest.raises(UserError, match=r"SLURM_TASKS_PER_NODE '2\(x3\)' of 4 nodes"):
        find_hosts("slurm", None)


def test_a_heterogeneous_allocation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All components are one world, to srun a part each; a node may belong to two."""
    known = {"JOB_NODELIST": "n1", "TASKS_PER_NODE": "1", "HET_SIZE": "2"}
    known |= {"JOB_NODELIST_HET_GROUP_0": "n1", "TASKS_PER_NODE_HET_GROUP_0": "1"}
    known |= {"JOB_NODELIST_HET_GROUP_1": "n1,n2,n3", "TASKS_PER_NODE_HET_GROUP_1": "2(x2),1"}
    known |= {"CPUS_PER_TASK_HET_GROUP_1": "4", "NTASKS_HET_GROUP_1": "5"}
    be_in_slurm(tmp_path, monkeypatch, **known)
    hosts = find_hosts("slurm", None)
    assert hosts == (Host("n1", 1, 0), Host("n1", 2, 1), Host("n2", 2, 1), Host("n3", 1, 1))
    words = launcher_words(["srun", "--mpi=pmi2"], hosts, Path("/there/agent"))
    assert " ".join(words).split(" : ") == [
        "srun --mpi=pmi2 --het-group=0 --cpus-per-task=1 --nodes=1 --nodelist=n1 "
        "--ntasks-per-node=1 --overlap --ntasks=1",
        # All of it, as SLURM has it.
        "--mpi=pmi2 --het-group=1 --cpus-per-task=4 --nodes=3 --overlap --ntasks=5",
    ]
    words = launcher_words(["srun", "--mpi=pmi2"], placed(hosts[2:], 2), Path("/there/agent"))
    assert words[:5] == ["srun", "--mpi=pmi2", "--het-group=1", "--cpus-per-task=4", "--nodes=1"]
    assert ":" not in words


def test_an_allocation_that_has_grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = [Host("n1", 2), Host("n2", 4)]
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert find_again("slurm", None, known) == known
    be_in_slurm(tmp_path, monkeypatch, JOB_ID="7", JOB_NODELIST="n1,n2")
    shown = (
        'case $* in "-o show job 7") echo "JobId=7 NodeList=n1,n2,n3 BatchHost=n1"; exit ;; esac'
    )
    script = tmp_path / "scontrol"
    script.write_text(script.read_text().replace("\necho", f"\n{shown}\necho"))
    assert find_again("slurm", None, known) == [*known, Host("n3", 4)]
    assert os.environ["SLURM_JOB_NODELIST"] == "n1,n2,n3", "which srun goes by"
    het = [host._replace(component=0) for host in known]
    assert find_again("slurm", None, het) == het


UNREAD = "srun: error: mpi/pmi2: invalid client request"
KILLED = [
    "slurmstepd-n1: error: StepId=1.2 exceeded memory limit (127 > 125), being killed",
    "slurmstepd: error: Exceeded job memory limit",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been",
    "srun: error: n1: task 0: Out Of Memory",
]
BY_PMI2 = "srun --mpi=pmi2"


@pytest.mark.parametrize(
    ("launcher", "line", "trouble"),
    [
        (BY_PMI2, UNREAD, slurm.UNREAD),
        ("srun --mpi=pmi2 --mpi=cray_shasta", UNREAD, ""),
        ("mpirun --mpi=pmi2", UNREAD, ""),
        (BY_PMI2, "torch: CUDA out of memory", ""),
        *((BY_PMI2, f"{UNREAD}\n{line}", slurm.OUT_OF_MEMORY) for line in KILLED),
    ],
)
def test_what_slurm_says(
    launcher: str, line: str, trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the log of the job, from this start on; a kill for memory is its word alone."""
    log = tmp_path / "log"
    log.write_text(f"{UNREAD}\n{KILLED[0]}\n")
    monkeypatch.setattr(slurm, "LOG", log)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    step = slurm.Step(launcher.split())
    assert step.is_by_pmi2 is (launcher == BY_PMI2)
    assert step.trouble() == ""
    with log.open("a") as file:
        file.write(f"all is well\n{line}\n")
    assert step.trouble() == trouble
    monkeypatch.setattr(slurm, "LOG", Path("/dev/null"))
    assert slurm.Step(launcher.split()).trouble() == ""


SRUN = """#!/bin/bash
case $* in
    *mpips.launch.rank*)
        echo "$TOLD" >&2
        [[ $TOLD != *invalid* ]] || exec sleep 600
        exit 137 ;;
esac
while [[ $1 == -* ]]; do shift; done
exec "$@"
"""


@pytest.mark.launch
@pytest.mark.parametrize("said", [KILLED[0], UNREAD, "died"])
def test_a_start_in_which_no_rank_begins(said: str, tmp_path: Path) -> None:
    """Another launcher takes the place of pmi2's, unless ranks were killed for memory."""
    host, other = platform.node(), said != KILLED[0]
    for name, text in (("srun", SRUN), ("scontrol", f"#!/bin/sh\necho {host}\n")):
        executable(tmp_path / name, text)
    known = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": host, "SLURM_TASKS_PER_NODE": "2"}
    env = {**environment(), **known, "TOLD": said}
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    how = f"--hosts slurm --restarts 1 --mpirun '{BY_PMI2}'"
    words = f"{how} -- --problem softmax --epochs 1 --out run"
    with open(tmp_path / "log", "w") as log:
        command = [sys.executable, "-m", "mpips.launch", *shlex.split(words)]
        done = subprocess.run(command, cwd=tmp_path, env=env, stderr=log, timeout=120, check=False)
    told = (tmp_path / "log").read_text()
    assert done.returncode == int(not other), told
    assert told.count("no rank got as far as to begin: starting by ") == other
    assert told.count(f"{slurm.UNREAD}: ending the job") == (said == UNREAD)
    assert told.count(slurm.OUT_OF_MEMORY) == 3 * (not other)
    left = {"srun", "scontrol", "log"} | ({"run"} if other else set())
    assert {path.name for path in tmp_path.iterdir()} == left
