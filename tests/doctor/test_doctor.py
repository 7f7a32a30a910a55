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

from mpips.planning.needs import groups, memory_limit
from mpips.tools.doctor import machine, network, report, storage
from mpips.tools.doctor.__main__ import judge_mpi, main
from mpips.tools.doctor.facts import Facts, networks, quota
from mpips.tools.doctor.report import EXIT_CODES, FAIL, OK, WARN, Finding, Report, ok, warn
from mpips.train import LAUNCHED

DOCTOR = ["-m", "mpips", "doctor"]
MB, GB = 10**6, 10**9
FINDINGS = [ok("cores", "a: 2 ranks on 2 cores"), warn("locks", "there are none", "mount", n=5.0)]
TABLE = """\
ok    cores  a: 2 ranks on 2 cores
warn  locks  there are none
             -> mount"""


@pytest.mark.parametrize("file", ["report.json", "none/report.json"])
def test_a_report(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the terminal, and as JSON; where that cannot be written, it is printed all the same."""
    made = Report("2 ranks on 1 node", tmp_path / file)
    made.add(FINDINGS)
    assert made.end() == (1 if "none" in file else 3)
    shown = capsys.readouterr()
    assert all(part in shown.out for part in ("2 ranks on 1 node", TABLE, "1 ok, 1 warn"))
    assert ("No such file or directory" in shown.err) is ("none" in file)
    if "none" not in file:
        data = json.loads((tmp_path / file).read_text())
        assert data["verdict"] == WARN
        names = {"check": "locks", "verdict": WARN, "found": "there are none", "remedy": "mount"}
        assert data["findings"][1] == {**names, "figures": {"n": 5.0}}


@pytest.mark.parametrize(
    ("verdicts", "code"), [((), 0), ((OK,), 0), ((OK, WARN), 3), ((FAIL, WARN, OK), 1)]
)
def test_the_exit_code_is_that_of_the_worst(verdicts: Sequence[str], code: int) -> None:
    assert EXIT_CODES[report.worst(Finding("c", v, "found", "remedy") for v in verdicts)] == code


def test_hosts_of_which_the_same_is_said_share_a_line() -> None:
    free = {"a": 1, "b": 1, "c": 2, "d": 1, "e": 1, "f": 1}
    found = report.per_host(free, lambda n: ok("memory", f"{n} GB"))
    assert [f.found for f in found] == ["a, b, d and 2 more: 1 GB", "c: 2 GB"]


LIMITS = {"open files": 4096, "locked memory": 8 * MB, "stack": 8 * MB}
LIMITS |= {"address space": math.inf, "core file": 0}
HEALTHY = Facts(
    host="a", cores=frozenset(range(4)), online=8, quota=math.inf, memory=64 * GB,
    shared_total=32 * GB, stale=0, large_page=2 << 20, limits=LIMITS, core_pattern="core",
    variables={}, networks={"eth0": 10e9},
)  # fmt: skip


def ranks(n: int, **changes: Any) -> list[Facts]:
    return [dataclasses.replace(HEALTHY, **changes)] * n


def pinned(*masks: set[int], **changes: Any) -> list[Facts]:
    return [dataclasses.replace(HEALTHY, cores=frozenset(mask), **changes) for mask in masks]


def test_a_healthy_host_is_ok() -> None:
    checks = ("cores", "threads", "namespaces", "leftovers", "pages", "limits")
    assert [(f.check, f.verdict) for f in machine.judge_machines(ranks(4))] == [
        (name, OK) for name in checks
    ]


JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_JOB_NUM_NODES": "2"}
NEED = network.Need(10 * GB, 20 * GB, math.inf, "")
LIBRARY = machine.Library("MPICH 5.0", "ch4:ucx", ("UCX",), True, (("numpy", "2.0"),), "EPYC")
SOCKETS = {0: frozenset({0, 1}), 1: frozenset({2, 3})}
FABRIC = {"eth0": 1e9, "mlx5_0/1": 100e9}


def threads(n: int, **variables: str) -> Finding:
    return machine.judge_threads(ranks(n, variables=variables))


def apart(n: int) -> Finding:
    return machine.judge_namespaces([ranks(1, namespace=f"{k}")[0] for k in range(n)])


def copies(value: str) -> Finding:
    return machine.judge_namespaces(ranks(2, variables={machine.COPIES: value}))


def limited(more: dict[str, Any] | None = None, **limits: float) -> list[Finding]:
    changed = {name.replace("_", " "): value for name, value in limits.items()}
    return machine.judge_limits(ranks(1, limits={**LIMITS, **changed}, **(more or {}))[0], 100)


def slurm(world: int, hosts: int, cores: int, **variables: str) -> list[Finding]:
    return machine.judge_slurm({**JOB, **variables}, world, hosts, cores)


def space(free: int, kind: str = "lustre") -> Finding:
    return storage.judge_space("/scratch", kind, free, 10 * GB)


def needed(parameters: int, **changes: Any) -> list[Finding]:
    return network.judge_needs({"a": NEED._replace(**changes)}, parameters)


def remote(*seconds: float) -> list[Finding]:
    return network.judge_remote_get(network.RemoteGet(*seconds))


def link_of(send: float = 100e6, host: str = "b", **rates: float) -> network.Link:
    found = {"pull": 0.9 * send, "push": 0.9 * send, "allreduce": 0.8 * send, **rates}
    return network.Link(("a", host), (0, 4), send, **found)


def linked(
    *args: Any, fabric: dict[str, float] | None = None, beside: int = 0, **rates: float
) -> list[Finding]:
    return network.judge_links([link_of(*args, **rates), *[link_of()] * beside], fabric or {})


def libraries(nodes: int, **changes: Any) -> list[Finding]:
    found = machine.judge_libraries([LIBRARY, dataclasses.replace(LIBRARY, **changes)], nodes)
    assert [f.check for f in found] == ["mpi", "software", "processor"]
    return found


JUDGED: list[tuple[Finding | list[Finding], str, str]] = [
    (machine.judge_cores(pinned({0}, {1}, {2, 3})), OK, "3 ranks on 4 cores"),
    (machine.judge_cores(ranks(5)), WARN, "5 ranks on 4 cores, of 8 there are .*--cpus-per-task"),
    (machine.judge_cores(ranks(8, online=4)), WARN, "8 ranks on 4 cores .*at most 4 ranks"),
    (machine.judge_cores(ranks(4, quota=1.5)), WARN, "the time of 1.5 cores .*docker --cpus"),
    (machine.judge_cores(pinned({0}, {0}, {1, 2})), WARN, "but 2 of them are bound to 1 core "),
    (machine.judge_cores(ranks(1, numa=SOCKETS)), OK, "1 rank on 4 cores of 2 NUMA nodes"),
    (threads(2, OMP_NUM_THREADS="2"), OK, "2 a rank, .*OMP_NUM_THREADS=2"),
    (threads(2, OMP_NUM_THREADS="4"), WARN, "for 2 a rank export OMP_NUM_THREADS=2:"),
    (apart(3), WARN, f"3 ranks in 3 user namespaces.*ch-run --join.*export {machine.COPIES}=1"),
    (copies("0"), WARN, f"unless {machine.COPIES}=0 export {machine.COPIES}=1"),
    (machine.judge_machines(ranks(1, stale=GB)), WARN, "1.0 GB of dead jobs in /dev/shm .*--clean"),
    (machine.judge_pages(ranks(2, large_page=0)), OK, "stay in pages of 4 KiB: Linux 6.1"),
    (limited(), OK, "open files 4096"),
    (limited(open_files=256), WARN, "256 open files, for 100 ranks ulimit -n 464"),
    (limited(stack=64 << 10), WARN, "a stack of 65.5 kB ulimit -s"),
    (limited(address_space=1 * GB), WARN, "an address space of 1.0 GB ulimit -v"),
    (limited(core_file=math.inf), WARN, "core files are written, to core ulimit -c 0"),
    (limited({"core_pattern": "|collect"}, core_file=math.inf), OK, "core file unlimited"),
    (limited({"networks": {"mlx5_0/1": 1e11}}), WARN, "InfiniBand.* memlock"),
    (machine.judge_slurm({}, 8, 1, 1), OK, "not in a SLURM job"),
    (slurm(8, 2, 1), OK, "job 7: 8 ranks on 2 nodes"),
    (slurm(8, 2, 4, SLURM_CPUS_PER_TASK="4"), OK, "job 7: 8 ranks on 2 nodes"),
    (slurm(4, 2, 1), WARN, "4 ranks in an allocation of 8 tasks start 8 ranks"),
    (slurm(16, 2, 1), WARN, "16 ranks in an allocation of 8 tasks ask for --ntasks=16"),
    (slurm(8, 1, 1), WARN, "ranks on 1 of 2 nodes .*--ntasks-per-node"),
    (slurm(8, 2, 1, SLURM_CPUS_PER_TASK="4"), WARN, "1 cores? a rank, where 4 .*srun"),
    (judge_mpi("MPICH 5.0.2", "", "MPICH"), OK, "mpirun of MPICH"),
    (judge_mpi("Open MPI v5.0.11", "", "MPICH"), FAIL, "but mpirun is that of MPICH"),
    (judge_mpi("MPICH 5.0.2", "", ""), WARN, "without an mpirun"),
    (judge_mpi("", "no libmpi", "MPICH"), FAIL, "does not start: no libmpi"),
    (machine.judge_start([1.0, 61.0]), WARN, "after 61.0 s"),
    (machine.judge_kernels(20.0, 6.0, 1.0), WARN, "XDG_CACHE_HOME"),
    (machine.judge_kernels(20.0, 6.0, 4.0), OK, ""),  # four ranks take turns on a core
    (space(100 * GB), OK, "/scratch is lustre with 100.0 GB free"),
    (space(25 * GB), WARN, "three checkpoints take 30.0 GB .*--keep 1"),
    (space(9 * GB), FAIL, "a checkpoint takes 10.0 GB .*another --out"),
    (space(100 * GB, "tmpfs"), WARN, "/scratch is tmpfs .*on a disk"),
    (storage.judge_rate(1e-9, 0.01, 10 * GB), OK, "1.0 GB/s .*, 10.0 ms a small file.*10.0 s"),
    (storage.judge_rate(5e-8, 0.01, 10 * GB), WARN, "20.0 MB/s .*500.0 s .*--checkpoint-every"),
    (storage.judge_lock(False), WARN, "does not keep others out, or there are no locks .*flock"),
    (storage.judge_hdf5("no space left"), FAIL, "no space left.*another --out"),
    (storage.judge_stamps(0.5), OK, "0.5 s ahead of this host's clock"),
    (storage.judge_stamps(-90.0), WARN, "90.0 s behind this host's clock .*NTP"),
    (storage.judge_seen(["a", "b"], [True, True]), OK, "all 2 hosts"),
    (storage.judge_seen([*"abcdef"], [True, *[False] * 5]), FAIL, "not seen on b, c, d and 2 more"),
    (storage.judge_remote_lock("b", False), WARN, "does not keep b out"),
    (needed(10**6), OK, "a: 20.0 GB free"),
    (needed(10**6, free=64 << 20), FAIL, "67.1 MB free .* 1,000,000 .* take 10.0 GB .*--shm-size"),
    (needed(10**9, memory="too much"), FAIL, "a: too much"),
    (needed(10**6, limit=2.0 * GB), FAIL, "a: 2.0 GB of memory, for windows of 10.0 GB"),
    (network.judge_window([([], 0.1), ([], 0.1)]), OK, "made in 100.0 ms"),
    (network.judge_window([([], 0.1), ([], 3.0)]), WARN, "made in 3000.0 ms"),
    (network.judge_window([([], 0.1), ([3], 0.1)]), FAIL, "rank 1 does not read what rank 3 wrote"),
    (remote(30e-6, 0.3, 1e-3), OK, "300 ms from one that computes for 300 ms, 1.0"),
    (remote(5e-3, 0.3, 1e-3), WARN, "5000 us from an owner that polls"),
    (remote(30e-6, 0.3, 0.3), WARN, "300.0 ms with a thread"),
    (network.judge_links([link_of()], {}, left_out=3), OK, "3 more"),
    (linked(), OK, "a to b: send 100.0 MB/s, pull 90.0 MB/s"),
    (linked(host="a"), OK, "ranks 0 and 4 on a: send"),
    (linked(pull=49e6), WARN, "of a send's rate pull 0.5 should be reached"),
    (linked(push=1e6, allreduce=1e6), WARN, "rate push 0.5 and allreduce 0.25 should"),
    (linked(10e9, pull=0.9e9), WARN, "rate pull 0.1 should"),
    (linked(10e9, "a", pull=0.9e9), OK, "pull 900.0 MB/s"),
    (linked(10e9, "a", pull=0.1e9), WARN, "rate pull 0.02 should"),
    (linked(20e6, "d", beside=2), WARN, "a to d carries 0.20 of what the others do"),
    (linked(1e9, fabric=FABRIC), WARN, "mlx5_0/1 is for 12.5 GB/s, a send reaches 1.0 GB/s"),
    (linked(11e9, fabric=FABRIC), OK, "a send reaches 11.0 GB/s"),
    (network.judge_clocks({"b": 0.001, "c": -0.4}), OK, "at most 400.00 ms apart, on c"),
    (network.judge_clocks({"b": 0.001, "c": -40.0}), WARN, "at most 40.0 s apart, on c"),
    (libraries(2), OK, "MPICH 5.0, device ch4:ucx, UCX loaded, threads allowed"),
    (libraries(1, multiple=False), OK, "without threads"),
    (libraries(2, multiple=False), WARN, "without threads"),
    (libraries(2, mpi="MPICH 4.2"), FAIL, "MPICH 4.2 and MPICH 5.0"),
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
    assert len(needed(10**9, memory="too much", limit=2.0 * GB)) == 1
    assert len(linked(1e9, host="a", fabric=FABRIC)) == 1


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")


def test_limits_of_control_groups(tmp_path: Path) -> None:
    """Of version 2, and of version 1."""
    write(tmp_path, {
        "slurm/job/cpu.max": "max 100000", "slurm/cpu.max": "250000 100000",
        "slurm/job/memory.max": "1000000", "memory.max": "max",
        "cpu/job/cpu.cfs_quota_us": "50000", "cpu/job/cpu.cfs_period_us": "100000",
        "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000",
    })  # fmt: skip
    for known, folders, cores, size in (
        ("0::/slurm/job\n", ("slurm/job", "slurm", ""), 2.5, 1e6),
        ("3:memory:/other\n2:cpu:/job\n", ("cpu/job", "cpu"), 0.5, math.inf),
    ):
        found = groups("cpu", tmp_path, known)
        assert found == [tmp_path / folder for folder in folders]
        assert (quota(found), memory_limit(found)) == (cores, size)


def test_networks(tmp_path: Path) -> None:
    write(tmp_path, {
        "net/eth0/speed": "25000", "net/eth0/operstate": "up", "net/eth0/device": "",
        "net/eth1/speed": "1000", "net/eth1/operstate": "down", "net/eth1/device": "",
        "net/eth2/speed": "-1", "net/eth2/operstate": "up", "net/eth2/device": "",
        "net/veth/speed": "10000", "net/veth/operstate": "up",
        "infiniband/mlx5_0/ports/1/rate": "100 Gb/sec (4X EDR)",
        "infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
    })  # fmt: skip
    assert networks(tmp_path) == {"eth0": 25e9, "mlx5_0/1": 100e9}


def test_a_folder_that_works(tmp_path: Path) -> None:
    folder, found = storage.try_folder(str(tmp_path / "runs" / "new"), 1)
    assert folder is not None
    assert folder.parent == tmp_path, "the nearest one that is there"
    verdicts = {f.check: f.verdict for f in found}
    assert verdicts["locks"] == verdicts["hdf5"] == OK
    assert [f.figures["write_mb_s"] > 0 for f in found if f.check == "writing"] == [True]
    assert storage.wait_for(folder, 0.0)
    assert not storage.wait_for(folder / "none", 0.2), "as on a host that does not see it"
    assert "File name too long" in storage.try_folder(300 * "x", 1)[1][0].found
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


def test_file_systems() -> None:
    mounts = "/dev/sda1 / ext4 rw 0 0\nserver:/home /home nfs4 rw 0 0\n"
    mounts += "tmp /a\\040b tmpfs rw 0 0\ndisk /données\\040é xfs rw 0 0\n"
    of = {"/home/me/runs": "nfs4", "/homes": "ext4", "/a b/c": "tmpfs", "/données é/runs": "xfs"}
    assert {path: storage.file_system(Path(path), mounts) for path in of} == of


@pytest.mark.parametrize(
    ("node_of", "expected"),
    [
        ([0], []),
        ([0, 0, 0], [(0, 1)]),
        ([0, 0, 1, 1, 2], [(0, 2), (0, 4)]),
        (list(range(10)), [(0, 1), (0, 3), (0, 5), (0, 7), (0, 9)]),
    ],
)
def test_which_links_are_measured(node_of: list[int], expected: list[tuple[int, int]]) -> None:
    assert network.pairs(node_of) == expected


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--limit nan", "--limit nan, expected seconds > 0"),
        ("--parameters 0", "--parameters 0, expected an integer >= 1"),
        ("--node-size -1", "--node-size -1, expected an integer >= 0"),
    ],
)
def test_mistakes(
    args: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    assert main(args.split()) == 2
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


ALWAYS = {
    *("world", "slurm", "mpi", "software", "processor", "start", "cores", "threads", "leftovers"),
    *("pages", "limits", "clocks", "folder", "writing", "locks", "hdf5", "file times", "sharing"),
    *("kernels", "memory", "window", "remote get", "ulfm"),
}


@pytest.mark.launch
def test_a_world_is_examined(tmp_path: Path) -> None:
    size, cores = 3, len(os.sched_getaffinity(0))
    how = ["--parameters", "1000", "--node-size", "1", "--limit", "60", "--json", "report.json"]
    done = launch.run(size, [*DOCTOR, *how], tmp_path, timeout_s=180)
    data = json.loads((tmp_path / "report.json").read_text())
    assert done.code == {OK: 0, WARN: 3, FAIL: 1}[data["verdict"]], done.output
    assert done.output.count("mpips 0.1.0, doctor") == 1, "once, by one rank"
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in data["findings"]:
        found.setdefault(finding["check"], []).append(finding)
        assert finding["found"] in done.output
        assert finding["remedy"] or finding["verdict"] == OK
        assert finding["verdict"] != FAIL, finding
    assert ALWAYS - set(found) == set()
    (told,) = found["cores"]
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
FAILED = [r"^fail  it .*rank 1 on .*: ValueError: a broken check"]
FAILED += [r"^fail  it .*no shared memory, expected some\n +-> buy some$"]


@pytest.mark.launch
@pytest.mark.parametrize(
    ("how", "told", "well"),
    [
        ("stuck", [r"^fail  it    not over after 3 s"], 1),
        ("broken", FAILED, 2),  # the rest is examined all the same
    ],
)
def test_a_check_that_hangs_or_fails_is_a_line_that_says_so(
    how: str, told: list[str], well: int, tmp_path: Path
) -> None:
    done = launch.run(3, ["-c", SCRIPT, how], tmp_path)
    assert done.code != 0
    assert [len(re.findall(line, done.output, re.M)) for line in told] == [1] * len(told)
    assert done.output.count("all is well") == well, "what came before it is told"
