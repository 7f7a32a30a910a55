"""``python -m mpips doctor``: what its findings mean, what it sees, and that it never hangs."""

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import launch
import pytest
from launch import python

from mpips.tools.doctor import storage
from mpips.tools.doctor.__main__ import judge_mpi, main
from mpips.tools.doctor.facts import Facts, groups, memory_limit, networks, quota
from mpips.tools.doctor.machine import (
    Library,
    judge_cores,
    judge_kernels,
    judge_libraries,
    judge_limits,
    judge_machines,
    judge_namespaces,
    judge_pages,
    judge_slurm,
    judge_start,
    judge_threads,
)
from mpips.tools.doctor.network import (
    Link,
    Need,
    RemoteGet,
    judge_clocks,
    judge_links,
    judge_needs,
    judge_quota,
    judge_remote_get,
    judge_window,
    pairs,
)
from mpips.tools.doctor.report import (
    EXIT_CODES,
    FAIL,
    OK,
    WARN,
    Finding,
    Report,
    lines,
    ok,
    per_host,
    summary,
    warn,
    worst,
)
from mpips.tools.doctor.storage import Storage
from mpips.train import LAUNCHED

DOCTOR = ["-m", "mpips", "doctor"]
MB, GB = 10**6, 10**9


FINDINGS = [ok("cores", "a: 2 ranks on 2 cores"), warn("locks", "there are none", "mount them")]
TABLE = """\
ok    cores  a: 2 ranks on 2 cores
warn  locks  there are none
             -> mount them"""


def test_the_table() -> None:
    assert lines(FINDINGS) == TABLE
    assert summary([*FINDINGS, ok("x", "y")]) == "2 ok, 1 warn"


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [((), 0), ((OK,), 0), ((OK, WARN), 3), ((FAIL, WARN, OK), 1), ((FAIL,), 1)],
)
def test_the_exit_code_is_that_of_the_worst(verdicts: Sequence[str], code: int) -> None:
    assert EXIT_CODES[worst(Finding("c", v, "found", "remedy") for v in verdicts)] == code


def test_hosts_of_which_the_same_is_said_share_a_line() -> None:
    free = {"a": 1, "b": 1, "c": 2, "d": 1, "e": 1, "f": 1}
    found = per_host(free, lambda n: ok("memory", f"{n} GB"))
    assert [f.found for f in found] == ["a, b, d and 2 more: 1 GB", "c: 2 GB"]


def test_a_report_is_written_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("2 ranks on 1 node", tmp_path / "report.json")
    report.add([warn("writing", "5 MB/s", "buy a disk", write_mb_s=5.0)])
    assert report.end() == 3
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["verdict"] == WARN
    assert data["findings"] == [
        {
            "check": "writing", "verdict": "warn", "found": "5 MB/s", "remedy": "buy a disk",
            "figures": {"write_mb_s": 5.0},
        }
    ]  # fmt: skip
    assert "2 ranks on 1 node" in capsys.readouterr().out


def test_a_report_that_cannot_be_written_is_printed_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report("1 rank", tmp_path / "none" / "report.json")
    report.add(FINDINGS)
    assert report.end() == 1
    shown = capsys.readouterr()
    assert TABLE in shown.out
    assert "No such file or directory" in shown.err


HEALTHY = Facts(
    host="a",
    cores=frozenset(range(4)),
    online=8,
    quota=math.inf,
    memory=64 * GB,
    shared_total=32 * GB,
    stale=0,
    large_page=2 << 20,
    limits={
        "open files": 4096,
        "locked memory": 8 * MB,
        "stack": 8 * MB,
        "address space": math.inf,
        "core file": 0,
    },
    core_pattern="core",
    variables={},
    networks={"eth0": 10e9},
)


def ranks(n: int, **changes: Any) -> list[Facts]:
    return [dataclasses.replace(HEALTHY, **changes)] * n


def pinned(*masks: set[int], **changes: Any) -> list[Facts]:
    return [dataclasses.replace(HEALTHY, cores=frozenset(mask), **changes) for mask in masks]


def test_a_healthy_host_is_ok() -> None:
    found = judge_machines(ranks(4))
    assert {f.verdict for f in found} == {OK}
    assert [f.check for f in found] == [
        *("cores", "threads", "namespaces", "leftovers", "pages", "limits")
    ]


JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_JOB_NUM_NODES": "2"}
GOOD = Storage("/scratch", "lustre", 100 * GB, 1e-9, 0.01, 0.0, True, "")
NEED = Need(10 * GB, 20 * GB, "")
LIBRARY = Library("MPICH 5.0.2", "ch4:ucx", ("UCX",), True, (("numpy", "2.0"),), "EPYC")
SOCKETS = {0: frozenset({0, 1}), 1: frozenset({2, 3})}
FABRIC = {"eth0": 1e9, "mlx5_0/1": 100e9}


def limited(**limits: float) -> list[Finding]:
    changed = {name.replace("_", " "): value for name, value in limits.items()}
    return judge_limits(ranks(1, limits={**HEALTHY.limits, **changed})[0], 100)


def slurm(world: int, hosts: int, cores: int, **variables: str) -> list[Finding]:
    return judge_slurm({**JOB, **variables}, world, hosts, cores)


def stored(**changes: Any) -> list[Finding]:
    found = storage.judge_storage(dataclasses.replace(GOOD, **changes), 10 * GB)
    assert len(found) == 5
    return found


def link_of(send: float = 100e6, host: str = "b", **rates: float) -> Link:
    found = {"pull": 0.9 * send, "push": 0.9 * send, "allreduce": 0.8 * send, **rates}
    return Link(("a", host), (0, 4), send, **found)


def linked(*args: Any, **rates: float) -> list[Finding]:
    return judge_links([link_of(*args, **rates)], {})


def libraries(nodes: int, **changes: Any) -> list[Finding]:
    found = judge_libraries([LIBRARY, dataclasses.replace(LIBRARY, **changes)], nodes)
    assert [f.check for f in found] == ["mpi", "software", "processor"]
    return found


JUDGED: list[tuple[Finding | list[Finding], str, str]] = [
    (judge_cores(ranks(4)), OK, "4 ranks on 4 cores"),
    (judge_cores(pinned({0}, {1}, {2, 3})), OK, "3 ranks on 4 cores"),
    (judge_cores(ranks(5)), WARN, "5 ranks on 4 cores, of 8 there are .*--cpus-per-task"),
    (judge_cores(ranks(9)), WARN, "9 ranks on 4 cores .*at most 4 ranks"),
    (judge_cores(ranks(8, online=4)), WARN, "8 ranks on 4 cores .*at most 4 ranks"),
    (judge_cores(ranks(4, quota=1.5)), WARN, "the time of 1.5 cores .*docker --cpus"),
    (judge_cores(pinned({0}, {0}, {1, 2})), WARN, "but 2 of them are bound to 1 core .*--bind-to"),
    (judge_cores(pinned({0, 1}, {0}, {1}, {2, 3})), WARN, "3 of them are bound to 2 cores"),
    (judge_cores(ranks(4, numa=SOCKETS)), WARN, "4 of them may run on several of 2 .*--map-by"),
    (judge_cores(pinned({0}, {1}, {2, 3}, numa=SOCKETS)), OK, "of 2 NUMA nodes, 2, 1 on them"),
    (judge_cores(pinned({0}, {1, 2}, {3}, numa=SOCKETS)), WARN, "1 of them .*cpus-per-task=1 "),
    (judge_cores(ranks(1, numa=SOCKETS)), OK, "1 rank on 4 cores of 2 NUMA nodes"),
    (judge_threads(ranks(2)), OK, "2 a rank"),
    (judge_threads(ranks(2, variables={"OMP_NUM_THREADS": "2"})), OK, "OMP_NUM_THREADS=2"),
    (
        judge_threads(ranks(2, variables={"OMP_NUM_THREADS": "4"})),
        WARN,
        "for 2 a rank export OMP_NUM_THREADS=2:",
    ),
    (judge_threads(ranks(9, variables={"MKL_NUM_THREADS": "2"})), WARN, "MKL_NUM_THREADS=1:"),
    (
        judge_machines([dataclasses.replace(HEALTHY, namespace=f"{k}") for k in range(3)]),
        WARN,
        "a: 3 ranks in 3 user namespaces.*ch-run --join.*export MPIR_CVAR_CH4_CMA_ENABLE=1",
    ),
    (judge_namespaces(ranks(2, variables={"MPIR_CVAR_CH4_CMA_ENABLE": "1"})), OK, "one"),
    (
        judge_namespaces(ranks(2, variables={"MPIR_CVAR_CH4_CMA_ENABLE": "0"})),
        WARN,
        "one, .* unless MPIR_CVAR_CH4_CMA_ENABLE=0 export MPIR_CVAR_CH4_CMA_ENABLE=1",
    ),
    (judge_machines(ranks(1, stale=GB)), WARN, "a: 1.0 GB of dead jobs in /dev/shm .*--clean"),
    (judge_pages(ranks(2)), OK, "put into pages of 2 MiB"),
    (judge_pages(ranks(2, large_page=0)), OK, "stay in pages of 4 KiB: Linux 6.1 and later"),
    (limited(), OK, "open files 4096"),
    (limited(open_files=256), WARN, "256 open files, for 100 ranks ulimit -n 464"),
    (limited(stack=64 << 10), WARN, "a stack of 65.5 kB ulimit -s"),
    (limited(address_space=1 * GB), WARN, "an address space of 1.0 GB ulimit -v"),
    (limited(core_file=math.inf), WARN, "core files are written, to core ulimit -c 0"),
    (judge_limits(ranks(1, networks={"mlx5_0/1": 1e11})[0], 1), WARN, "InfiniBand.* memlock"),
    (judge_slurm({}, 8, 1, 1), OK, "not in a SLURM job"),
    (slurm(8, 2, 1), OK, "job 7: 8 ranks on 2 nodes"),
    (slurm(8, 2, 1, SLURM_NTASKS="2"), OK, "job 7: 8 ranks on 2 nodes"),
    (slurm(8, 2, 4, SLURM_CPUS_PER_TASK="4"), OK, "job 7: 8 ranks on 2 nodes"),
    (slurm(4, 2, 1), WARN, "4 ranks in an allocation of 8 tasks start 8 ranks"),
    (slurm(16, 2, 1), WARN, "16 ranks in an allocation of 8 tasks ask for --ntasks=16"),
    (slurm(8, 1, 1), WARN, "ranks on 1 of 2 nodes .*--ntasks-per-node"),
    (slurm(8, 2, 1, SLURM_CPUS_PER_TASK="4"), WARN, "1 cores? a rank, where 4 .*srun"),
    (judge_mpi("MPICH 5.0.2", "", "MPICH"), OK, "mpirun of MPICH"),
    (judge_mpi("Open MPI v5.0.11", "", "MPICH"), FAIL, "but mpirun is that of MPICH"),
    (judge_mpi("MPICH 5.0.2", "", "Open MPI"), FAIL, "but mpirun is that of Open MPI"),
    (judge_mpi("MPICH 5.0.2", "", ""), WARN, "without an mpirun"),
    (judge_mpi("", "no libmpi", "MPICH"), FAIL, "does not start: no libmpi"),
    (judge_start([1.0, 2.0]), OK, ""),
    (judge_start([1.0, 61.0]), WARN, "after 61.0 s"),
    (judge_kernels(20.0, 1.0, 1.0), OK, ""),
    (judge_kernels(20.0, 6.0, 1.0), WARN, "XDG_CACHE_HOME"),
    (judge_kernels(20.0, 6.0, 4.0), OK, ""),  # four ranks take turns on a core
    (stored(), OK, ""),
    (stored(free=25 * GB), WARN, "three checkpoints take 30.0 GB .*--keep 1"),
    (stored(free=9 * GB), FAIL, "a checkpoint takes 10.0 GB .*another --out"),
    (stored(kind="tmpfs"), WARN, "/scratch is tmpfs .*on a disk"),
    (stored(write_s=1 / (20 * MB)), WARN, "20.0 MB/s .*takes 500.0 s .*--checkpoint-every"),
    (stored(locks=False), WARN, "does not keep others out, or there are no locks .*flock"),
    (stored(hdf5="no space left"), FAIL, "no space left.*another --out"),
    (stored(ahead_s=-90.0), WARN, "90.0 s behind this host's clock .*NTP"),
    (storage.judge_seen(["a"], [True]), OK, "one host"),
    (storage.judge_seen(["a", "b"], [True, True]), OK, "all 2 hosts"),
    (
        storage.judge_seen(list("abcdefg"), [True, *[False] * 5, True]),
        FAIL,
        "what rank 0 writes is not seen on b, c, d and 2 more",
    ),
    (storage.judge_remote_lock("b", True), OK, "keeps b out too"),
    (storage.judge_remote_lock("b", False), WARN, "does not keep b out"),
    (judge_needs({"a": NEED}, 10**6), OK, "a: 20.0 GB free"),
    (
        judge_needs({"a": NEED._replace(free=64 << 20)}, 10**6),
        FAIL,
        "a: 67.1 MB free in /dev/shm, windows for 1,000,000 parameters take 10.0 GB "
        ".*--shm-size.*--window private",
    ),
    (judge_needs({"a": NEED._replace(memory="too much")}, 10**9), FAIL, "a: too much"),
    (
        judge_quota(ranks(2, memory=2 * GB), {"a": NEED}),
        FAIL,
        "a: 2.0 GB of memory, for .* 10.0 GB",
    ),
    (judge_window([([], 0.1), ([], 0.1)]), OK, "made in 100.0 ms"),
    (judge_window([([], 0.1), ([], 3.0)]), WARN, "made in 3000.0 ms"),
    (judge_window([([], 0.1), ([3], 0.1)]), FAIL, "rank 1 does not read what rank 3 wrote"),
    (
        judge_remote_get(RemoteGet(30e-6, 0.3, 1e-3)),
        OK,
        "300 ms from one that computes for 300 ms, 1.0",
    ),
    (judge_remote_get(RemoteGet(30e-6, 2e-6, 2e-6)), OK, "0 ms from one that computes"),
    (judge_remote_get(RemoteGet(5e-3, 0.3, 1e-3)), WARN, "5000 us from an owner that polls"),
    (judge_remote_get(RemoteGet(30e-6, 0.3, 0.3)), WARN, "300.0 ms with a thread"),
    (judge_links([], FABRIC), OK, "no link"),
    (judge_links([link_of()], {}, left_out=3), OK, "3 more"),
    (linked(), OK, "a to b: send 100.0 MB/s, pull 90.0 MB/s"),
    (linked(host="a"), OK, "ranks 0 and 4 on a: send"),
    (linked(pull=49e6), WARN, "of a send's rate pull 0.5 should be reached"),
    (linked(push=1e6, allreduce=1e6), WARN, "rate push 0.5 and allreduce 0.25 should"),
    (linked(10e9, pull=2e9), OK, "pull 2.0 GB/s"),
    (linked(10e9, pull=0.9e9), WARN, "rate pull 0.1 should"),
    (linked(10e9, "a", pull=0.9e9), OK, "pull 900.0 MB/s"),
    (linked(10e9, "a", pull=0.1e9), WARN, "rate pull 0.02 should"),
    (
        judge_links([link_of(), link_of(host="c"), link_of(20e6, host="d")], {}),
        WARN,
        "a to d carries 0.20 of what the others do",
    ),
    (
        judge_links([link_of(1e9)], FABRIC),
        WARN,
        "mlx5_0/1 is for 12.5 GB/s, a send reaches 1.0 GB/s",
    ),
    (judge_links([link_of(11e9)], FABRIC), OK, "a send reaches 11.0 GB/s"),
    (judge_clocks({}), OK, "one clock"),
    (judge_clocks({"b": 0.001, "c": -0.4}), OK, "at most 400.00 ms apart, on c"),
    (judge_clocks({"b": 0.001, "c": -40.0}), WARN, "at most 40.0 s apart, on c"),
    (libraries(2), OK, "MPICH 5.0.2, device ch4:ucx, UCX loaded, threads allowed"),
    (libraries(1, multiple=False), OK, "without threads"),
    (libraries(2, multiple=False), WARN, "without threads"),
    (libraries(2, mpi="MPICH 4.2"), FAIL, "MPICH 4.2 and MPICH 5.0.2"),
    (libraries(2, versions=(("numpy", "1.26"),)), FAIL, "numpy 2.0; elsewhere numpy 1.26"),
    (libraries(2, cpu="Xeon"), WARN, "EPYC; Xeon"),
]


@pytest.mark.parametrize(("found", "verdict", "text"), JUDGED)
def test_what_it_means(found: Finding | list[Finding], verdict: str, text: str) -> None:
    findings = [found] if isinstance(found, Finding) else found
    bad = [f for f in findings if f.verdict != OK]
    assert [f.verdict for f in bad] == [verdict] * (verdict != OK)
    told = [re.search(text, f"{f.found} {f.remedy}") for f in bad or findings]
    assert any(told), findings


def test_what_is_told_once() -> None:
    """A model that is too large for the memory; and one host that uses no network."""
    assert judge_quota(ranks(2), {"a": NEED._replace(memory="too much")}) == []
    assert judge_quota(ranks(2), {"a": NEED}) == []
    assert len(judge_links([link_of(1e9, host="a")], FABRIC)) == 1
    handled = dataclasses.replace(ranks(1, core_pattern="|collect")[0], limits={
        **HEALTHY.limits, "core file": math.inf,
    })  # fmt: skip
    assert [f.verdict for f in judge_limits(handled, 1)] == [OK], "a handler takes the core files"


@pytest.mark.parametrize(
    ("files", "known", "folders", "cores", "bytes_"),
    [
        (
            {
                "slurm/job/cpu.max": "max 100000", "slurm/cpu.max": "250000 100000",
                "slurm/job/memory.max": "1000000", "memory.max": "max",
            },
            *("0::/slurm/job\n", ("slurm/job", "slurm", ""), 2.5, 1e6),
        ),
        (
            {
                "cpu/job/cpu.cfs_quota_us": "50000", "cpu/job/cpu.cfs_period_us": "100000",
                "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000",
            },
            *("3:memory:/other\n2:cpu:/job\n", ("cpu/job", "cpu"), 0.5, math.inf),
        ),
    ],
)  # fmt: skip
def test_limits_of_control_groups(
    files: dict[str, str], known: str, folders: Sequence[str], cores: float, bytes_: float,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Of version 2, and of version 1."""
    write(tmp_path, files)
    found = groups("cpu", tmp_path, known)
    assert found == [tmp_path / folder for folder in folders]
    assert (quota(found), memory_limit(found)) == (cores, bytes_)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")


def test_networks(tmp_path: Path) -> None:
    files = {
        "net/eth0/speed": "25000", "net/eth0/operstate": "up",
        "net/eth1/speed": "1000", "net/eth1/operstate": "down",
        "net/eth2/speed": "-1", "net/eth2/operstate": "up", "net/eth2/device": "",
        "net/veth/speed": "10000", "net/veth/operstate": "up",
        "net/eth0/device": "", "net/eth1/device": "",
        "infiniband/mlx5_0/ports/1/rate": "100 Gb/sec (4X EDR)",
        "infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
    }  # fmt: skip
    write(tmp_path, files)
    assert networks(tmp_path) == {"eth0": 25e9, "mlx5_0/1": 100e9}


def test_a_folder_that_works(tmp_path: Path) -> None:
    folder, found = storage.try_folder(str(tmp_path), 1)
    assert folder is not None
    assert folder.parent == tmp_path
    verdicts = {f.check: f.verdict for f in found}
    assert verdicts["locks"] == verdicts["hdf5"] == OK
    assert [f.figures["write_mb_s"] > 0 for f in found if f.check == "writing"] == [True]
    shutil.rmtree(folder)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("tempfile.mkdtemp", PermissionError(13, "Permission denied")),
        ("os.fsync", OSError(28, "No space left on device")),
    ],
)
def test_a_folder_that_cannot_be_written_is_left_empty(
    call: str, error: OSError, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(call, refuse)
    folder, (found,) = storage.try_folder(str(tmp_path), 1)
    assert folder is None
    assert (found.verdict, found.found) == (FAIL, f"{tmp_path}: {error.strerror}")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_that_is_tried(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    assert storage.run_folder(str(tmp_path / "there")) == tmp_path / "there"
    assert storage.run_folder(str(tmp_path / "there" / "runs" / "new")) == tmp_path / "there"


def test_what_another_host_does_not_see(tmp_path: Path) -> None:
    assert storage.wait_for(tmp_path, 0.0)
    assert not storage.wait_for(tmp_path / "none", 0.2)


def test_file_systems() -> None:
    mounts = "/dev/sda1 / ext4 rw 0 0\nserver:/home /home nfs4 rw 0 0\ntmp /a\\040b tmpfs rw 0 0\n"
    assert storage.file_system(Path("/home/me/runs"), mounts) == "nfs4"
    assert storage.file_system(Path("/homes"), mounts) == "ext4"
    assert storage.file_system(Path("/a b/c"), mounts) == "tmpfs"
    mounts += "disk /données\\040é xfs rw 0 0\n"
    assert storage.file_system(Path("/données é/runs"), mounts) == "xfs"


@pytest.mark.parametrize(
    ("node_of", "expected"),
    [
        ([0], []),
        ([0, 0, 0], [(0, 1)]),
        ([0, 0, 1, 1, 2], [(0, 2), (0, 4)]),
        ([0, 1, 0, 1], [(0, 1)]),
        (list(range(10)), [(0, 1), (0, 3), (0, 5), (0, 7), (0, 9)]),
    ],
)
def test_which_links_are_measured(node_of: list[int], expected: list[tuple[int, int]]) -> None:
    assert pairs(node_of) == expected


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--limit", "0"], "--limit 0.0, expected seconds > 0"),
        (["--limit", "nan"], "--limit nan, expected seconds > 0"),
        (["--parameters", "0"], "--parameters 0, expected an integer >= 1"),
        (["--node-size", "-1"], "--node-size -1, expected an integer >= 0"),
        (["--fast"], "command line: unrecognized arguments: --fast, expected what --help"),
    ],
)
def test_mistakes(
    args: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    assert main(args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mpips: {message}")


@pytest.mark.launch
@pytest.mark.one_mpi
def test_one_process_says_how_to_start_it(tmp_path: Path) -> None:
    done = python(*DOCTOR, "--json", "report.json", cwd=tmp_path, code=None)
    data = json.loads((tmp_path / "report.json").read_text())
    found = {f["check"]: f for f in data["findings"]}
    assert found["world"]["remedy"].startswith("mpirun -n 8 python -m mpips doctor")
    assert found["mpi"]["verdict"] == OK, found["mpi"]
    assert {"cores", "limits", "folder", "writing", "locks"} <= set(found)
    assert done.returncode == {WARN: 3, FAIL: 1}[data["verdict"]], done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def examine(size: int, *args: str, cwd: Path) -> dict[str, list[dict[str, Any]]]:
    """Run the doctor in a world; returns its findings by check."""
    command = [*DOCTOR, *args, "--limit", "60", "--json", "report.json"]
    done = launch.run(size, command, cwd, timeout_s=180)
    data = json.loads((cwd / "report.json").read_text())
    assert done.code == {OK: 0, WARN: 3, FAIL: 1}[data["verdict"]], done.output
    assert done.output.count("mpips 0.1.0, doctor") == 1, "once, by one rank"
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in data["findings"]:
        found.setdefault(finding["check"], []).append(finding)
        assert finding["found"] in done.output
        assert finding["remedy"] or finding["verdict"] == OK
    return found


def failed(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    return [f["check"] for findings in found.values() for f in findings if f["verdict"] == FAIL]


ALWAYS = {
    *("world", "slurm", "mpi", "software", "processor", "start", "cores", "threads", "leftovers"),
    "pages",
    *("limits", "clocks", "folder", "writing", "locks", "hdf5", "file times", "sharing"),
    *("kernels", "memory", "window", "remote get", "ulfm"),
}


@pytest.mark.launch
def test_a_world_is_examined(tmp_path: Path) -> None:
    size = 3
    found = examine(size, "--parameters", "1000", "--node-size", "1", cwd=tmp_path)
    assert ALWAYS - set(found) == set()
    assert failed(found) == []
    (told,), cores = found["cores"], len(os.sched_getaffinity(0))
    if size > cores:
        assert told["verdict"] == WARN
        assert f"{size} ranks on {cores} core" in told["found"]
    rates = [f["figures"] for f in found.get("link", [])]
    assert len(rates) == 2
    names = {"send_mb_s", "pull_mb_s", "push_mb_s", "allreduce_mb_s"}
    assert all(set(r) == names and min(r.values()) > 0 for r in rates)
    (remote,) = found["busy owner"]
    assert min(remote["figures"][k] for k in ("polling_us", "busy_ms", "helped_ms")) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"], "nothing is left"


SCRIPT = """
import os, sys, time
from mpips.tools.doctor import world
from mpips.tools.doctor.report import GRACE_S, Options, Report, Watch, ok
from mpips.errors import UserError
from mpips.train import LAUNCHED

def stuck(visit):
    if visit.cluster.rank == 1:
        time.sleep(600)
    if how == "inside MPI":
        visit.cluster.comm.Barrier()

def broken(visit):
    if visit.cluster.rank == 1:
        raise ValueError("a broken check")

def refused(visit):
    raise UserError("no shared memory", "some", "buy some")

def fine(visit):
    return "all is well"

def judge(visit, parts):
    return [ok("fine", parts[0])]

how = sys.argv[1]
first = next(os.environ[name] for name in LAUNCHED if name in os.environ) == "0"
report = Report("?", None, first)
watch = Watch(3 + (0 if first else GRACE_S), report.expire)
runs = [broken, refused] if how == "broken" else [stuck]
it = [world.Check("it", run, judge) for run in runs]
checks = [world.Check("before", fine, judge), *it, world.Check("after", fine, judge)]
sys.exit(world.run(Options(), watch, report, checks))
"""


@pytest.mark.launch
@pytest.mark.parametrize("how", ["inside MPI", pytest.param("outside MPI", marks=pytest.mark.long)])
def test_a_check_that_hangs_is_a_line_that_says_so(how: str, tmp_path: Path) -> None:
    done = launch.run(3, ["-c", SCRIPT, how], tmp_path)
    assert done.code != 0
    assert re.search(r"^fail  it    not over after 3 s", done.output, re.M), done.output
    assert done.output.count("all is well") == 1, "what came before it is told, and no more"


@pytest.mark.launch
def test_checks_that_raise_or_refuse_are_lines_that_say_so(tmp_path: Path) -> None:
    """What is refused has its remedy."""
    done = launch.run(3, ["-c", SCRIPT, "broken"], tmp_path).check(1)
    told = r"^fail  it .*rank 1 on .*: ValueError: a broken check"
    assert re.search(told, done.output, re.M), done.output
    assert done.output.count("all is well") == 2, "the rest is examined all the same"
    assert len(re.findall(r"^fail  it .*no shared memory, expected some$", done.output, re.M)) == 1
    assert len(re.findall(r"^ +-> buy some$", done.output, re.M)) == 1
