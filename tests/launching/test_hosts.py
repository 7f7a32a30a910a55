"""The hosts of a job as they are given, or as SLURM has them, and what the steps of SLURM say."""

import fcntl
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch import environment, executable

from mpips.checkpoint.run_folder import LOCK
from mpips.config.command_line import parse_command_line
from mpips.errors import UserError
from mpips.launch import __main__ as command
from mpips.launch import slurm, supervise
from mpips.launch.hosts import Host, find_hosts, launcher_words, placed
from mpips.launch.mpirun import is_open_mpi, mpirun
from mpips.launch.placement import changed_options, words_of
from mpips.launch.returned import find_again
from mpips.layout.roles import assign

MANY = [f"node{k:04}:8" for k in range(500)]


@pytest.mark.parametrize(
    ("text", "ranks", "found"),
    [
        ("a:4,b:2", 5, "a:4 b:2"),
        ("a,b,c", 7, "a:3 b:3 c:3"),
        ("a:1,b:2,a:3", None, "a:4 b:2"),
        ("10.0.0.1:2,", None, "10.0.0.1:2"),
        (",".join(MANY), None, " ".join(MANY)),  # more than a path may have
    ],
)
def test_hosts(text: str, ranks: int | None, found: str) -> None:
    assert " ".join(map(str, find_hosts(text, ranks))) == found


def test_a_file_of_hosts(tmp_path: Path) -> None:
    """Of either MPI, with limits and interfaces, which MPICH is told of by a file again."""
    file, agent = tmp_path / "hosts", tmp_path / "agent"
    lines = "# mine", "a:4 max_slots=8", "", "b slots=2  # of 8", "c max-slots=2 slots = 1"
    file.write_text("\n".join([*lines, "d:1 ifname=eth1\n"]))
    hosts = find_hosts(str(file), None)
    assert " ".join(map(str, hosts)) == "a:4 b:2 c:1 d:1"
    words = launcher_words([mpirun(), "-v"], placed(hosts[1:], 4), agent)
    assert words[:2] == [mpirun(), "-v"]
    if is_open_mpi():
        assert words[-2:] == ["--host", "b:2,c:1,d:1"]
        assert f"--prtemca plm_ssh_agent {agent}" in " ".join(words)
    else:
        assert words[2:] == f"-launcher ssh -launcher-exec {agent} -f {file}".split()
        assert file.read_text() == "b:2\nc:1\nd:1 ifname=eth1\n"
    file.write_text("node1 slots=4 sluts=8\n")
    with pytest.raises(UserError, match="'node1 slots=4 sluts=8' in --hosts"):
        find_hosts(str(file), None)


@pytest.mark.parametrize(
    ("text", "ranks", "error"),
    [
        ("a,b", None, "--hosts a,b without numbers of ranks, expected names with numbers"),
        ("a:2,b", 3, "--hosts a:2,b with numbers on some, expected a number on each, or on none"),
        ("a:2,b:2", 5, "-n 5 on hosts of 4 ranks, expected -n <= 4"),
        ("a:0", None, "'a:0' in --hosts a:0, expected names with numbers"),
        (",", None, "--hosts ',' without a host"),
        ("n[01-04]:4", None, r"'n\[01-04\]:4' in --hosts n\[01-04\]:4, expected names"),
        ("./none", 4, "'./none' in --hosts ./none, expected names with numbers"),
    ],
)
def test_hosts_that_cannot_be(text: str, ranks: int | None, error: str) -> None:
    with pytest.raises(UserError, match=error):
        find_hosts(text, ranks)


NODES = ["a"] * 4 + ["b"] * 4  # what is left of 12 ranks


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ("--servers 3", "--servers=2"),
        ("--servers 1", ""),
        ("--servers 11", "--servers=7"),
        ("--mode sync --servers 0", ""),
        ("--mode sync --servers 3", "--servers=2"),
        ("--server-ranks 0,4,8", "--server-ranks=0,4"),
        ("--server-ranks 0,4,8 --servers 3", "--server-ranks=0,4 --servers=2"),
        ("--server-ranks 0,4", ""),
        ("--server-ranks 8,9,10", "--server-ranks= --servers=2"),
        ("--server-hosts a --servers 3", "--servers=2"),
        ("--server-hosts c", "--servers=2 --server-hosts="),
        ("--server-hosts a,c --servers 8", "--servers=4"),
        ("--mode sync --servers 3 --backup-workers 6", "--servers=2 --backup-workers=5"),
        ("--servers 2 --spares 1", "--servers=1 --spares=0"),
        ("--servers 3 --evaluators 4", "--servers=2"),  # 3 of 8 that train, 2 of 4
    ],
)
def test_options_of_fewer_ranks(given: str, changes: str) -> None:
    """They change as little as it takes, and are options still."""
    options = parse_command_line(given.split()).options
    assert changed_options(options, 8, NODES) == {}, "as many as it was asked for"
    words = words_of(changed_options(options, 12, NODES))
    assert " ".join(words) == changes
    again: dict[str, Any] = {**options, **parse_command_line(words).options}
    names = ("servers", "server_ranks", "server_hosts")
    placing = {name: again[name] for name in names if name in again}
    assert assign(again.get("mode", "async"), NODES, [0] * 8, **placing).workers


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
    line = r"JobId=7 JobName=gr\\374n NodeList=n1,n2,n3"  # in Latin-1
    shown = f'case $* in "-o show job 7") printf "{line}"; exit ;; esac'
    script = tmp_path / "scontrol"
    script.write_text(script.read_text().replace("\necho", f"\n{shown}\necho"))
    assert find_again("slurm", None, known) == [*known, Host("n3", 4)]
    assert os.environ["SLURM_JOB_NODELIST"] == "n1,n2,n3", "which srun goes by"
    het = [host._replace(component=0) for host in known]
    assert find_again("slurm", None, het) == het


def test_a_start_of_slurm_waits_for_ranks_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They hold the run until their host knows, or the file server that it is lost."""
    known = {"JOB_ID": "17", "RESTART_COUNT": "1", "JOB_NODELIST": platform.node()}
    be_in_slurm(tmp_path, monkeypatch, **known, TASKS_PER_NODE="2")
    rsh = executable(tmp_path / "rsh", '#!/bin/sh\nshift\nexec sh -c "$*"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervise, "ASK_AGAIN_S", 0.1)
    words = ["--hosts", "slurm", "--rsh", str(rsh), "--timeout", "1", "--", "--out", "run"]
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert command.main(words) == 85
    assert "ranks of the start before still hold run: run it again" in capsys.readouterr().err


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
