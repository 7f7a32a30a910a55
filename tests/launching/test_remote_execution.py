"""Other hosts, asked whether they answer, and what is left on them; here all are this machine."""

import contextlib
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from launch import environment, executable

from mpips.checkpoint.run_folder import METRICS
from mpips.launch import __main__ as command
from mpips.launch import heartbeat, placement, remote_execution
from mpips.launch.heartbeat import Terms
from mpips.launch.hosts import Host, find_hosts
from mpips.launch.order import Order
from mpips.launch.placement import Placement
from mpips.launch.remote_execution import RemoteExecution
from mpips.launch.returned import HostReturn, find_again
from mpips.launch.watch import Heartbeats, Rank, Run
from mpips.mpi.process import STARTED, running, send_signal, stat_of

# As ssh: its options, a host, and a command. Hosts are down, or hang, where there is a file.
RSH = """\
#!/bin/sh
while case $1 in -*) ;; *) false ;; esac; do shift; done
here=$(dirname "$0")
if [ -e "$here/$1.hangs" ]; then sleep 600; fi
if [ -e "$here/$1.down" ]; then echo "no route to $1" >&2; exit 255; fi
shift
exec /bin/sh -c "$*"
"""
ALL = [Host("a", 2), Host("b", 2), Host("c", 2)]


@pytest.fixture
def rsh(tmp_path: Path) -> Path:
    """A remote command."""
    return executable(tmp_path / "rsh command", RSH)


@pytest.fixture
def there(rsh: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteExecution]:
    """The way to hosts by it."""
    monkeypatch.chdir(rsh.parent)
    found = RemoteExecution([str(rsh), "-q"], False, rsh.parent)
    yield found
    found.close()


def never() -> bool:
    return False


def test_hosts_answer_or_do_not(
    there: RemoteExecution, rsh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are asked at once, and one that hangs is left to itself."""
    rsh.with_name("b.down").touch()
    rsh.with_name("c.hangs").touch()
    expected = {"b": "no route to b", "c": "no answer"}
    assert there.ask("abc", doubtful="c") == expected
    assert there.nodes == {"a": platform.node()}
    monkeypatch.setattr(remote_execution, "ANSWER_S", 0.5)
    assert there.ask("c") == {"c": "no answer"}
    names = [f"x{k}" for k in range(40)]
    for name in names:
        rsh.with_name(f"{name}.down").touch()
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        assert len(there.ask(names)) == 40, "more hosts than a process may have open files"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
    there.close()
    assert not there.agent.exists()


def test_hosts_name_ranks_that_have_died(there: RemoteExecution, rsh: Path) -> None:
    """Those of the current attempt that have not come to an end; their host alone sees that."""
    here = {"host": platform.node(), "started": int(stat_of(os.getpid())[STARTED])}
    for attempt in (1, 2):
        job = Heartbeats(rsh.parent / f"{attempt}")
        job.begin(Terms())
        pids = {"0": os.getpid(), "1": 2**22 + attempt, "2": 2**22 + 3}
        for name, pid in pids.items():
            lines = [{**here, "pid": pid}, *[{"code": 0}] * (name == "2")]
            text = "".join(f"{json.dumps(line)}\n" for line in lines)
            (job.folder / f"{name}{heartbeat.LINES}").write_text(text)
        if attempt == 1:
            job.end()
    assert there.ask("ab") == {}
    assert there.nodes == {"a": platform.node(), "b": platform.node()}
    assert there.gone == {platform.node(): {2**22 + 2}}


@pytest.mark.long
def test_a_folder_that_a_host_does_not_have(rsh: Path, tmp_path: Path) -> None:
    with contextlib.closing(RemoteExecution([str(rsh)], False, tmp_path / "none")) as there:
        assert f"no folder {tmp_path / 'none'} on {platform.node()}" in there.ask("a")["a"]


def test_the_agent_of_slurm_takes_the_host_out_of_the_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable(tmp_path / "srun", '#!/bin/sh\nfor k; do echo "[$k]"; done\n')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def told(hosts: Sequence[Host], *words: str) -> str:
        with contextlib.closing(RemoteExecution((), True, tmp_path, hosts)) as there:
            return subprocess.check_output([there.agent, *words], text=True)

    found = told((), "-x", "n2", "cd /x &&", "prted", "-v 1")
    assert "[--het-group" not in found
    assert found.endswith("[--nodelist=n2]\n[/bin/sh]\n[-c]\n[cd /x && prted -v 1]\n")
    assert "[--overlap]" in found
    found = told([Host("n1", 1, 0), Host("n2", 2, 1)], "n2", "prted")
    assert "[--het-group=1]\n[--nodelist=n2]\n" in found


NOEXEC = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o noexec tmp "$0" && exec "$@"']


def test_temporary_files_that_may_not_be_programs(rsh: Path) -> None:
    """As on hardened hosts: a job is refused, with what to do."""
    if subprocess.run([*NOEXEC, rsh.parent, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a mount namespace")
    words = ["-m", "mpips.launch", "--hosts", "a:2", "--"]
    told = subprocess.run(
        [*NOEXEC, str(rsh.parent), sys.executable, *words], cwd=rsh.parent.parent,
        env={**environment(), "TMPDIR": str(rsh.parent)}, capture_output=True, text=True,
    )  # fmt: skip
    assert "which is mounted without them, expected a folder for temporary files" in told.stderr
    assert told.returncode == 2


DAEMON = "#!/bin/sh\nsleep 600 & echo $!\nwait\n"


def test_ranks_that_are_left_end_with_their_daemon(there: RemoteExecution, tmp_path: Path) -> None:
    """And no process that has got the number of one of them since."""
    daemon = executable(tmp_path / "prted", DAEMON)
    with subprocess.Popen([daemon], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        rank = int(job.stdout.readline())
        try:
            started = int(stat_of(rank)[STARTED])
            there.nodes = {"a": platform.node(), "b": "b"}
            there.leave("elsewhere", rank, started)
            assert there.left == {}
            there.leave(platform.node(), rank, started + 1)
            assert there.ask("a") == {}
            assert running([rank, job.pid]) == [rank, job.pid]
            there.leave(platform.node(), rank, started)
            assert list(there.left) == ["a"]
            assert there.ask("a") == there.left == {}
            assert job.wait(10) == -signal.SIGKILL
        finally:
            for pid in (rank, job.pid):
                send_signal(pid)
    assert running([rank]) == []
    assert remote_execution.end([(rank, started)]) == []


def test_a_rank_ends_when_its_attempt_is_over(tmp_path: Path) -> None:
    """Also one that nobody reaches, and one that begins too late."""
    current = tmp_path / heartbeat.CURRENT
    script = (
        "import sys, time; from pathlib import Path; from mpips.launch import heartbeat\n"
        "heartbeat.LOOK_S = 0.1; heartbeat.end_when_over(Path(sys.argv[1]))\n"
        "print('up', flush=True)\n"
        "time.sleep(600)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    current.touch()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "up\n"
        time.sleep(0.5)
        assert rank.poll() is None
        current.unlink()
        assert rank.wait(10) == -signal.SIGKILL
    late = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60)
    assert (late.returncode, late.stdout) == (-signal.SIGKILL, "")


def rank(name: str, host: str) -> Rank:
    return Rank(name, host, 2**22 + 1, 7)  # of no process


class Answers:
    """A way to hosts, in the place of `RemoteExecution`: those in `down` do not answer."""

    def __init__(self, down: str = "") -> None:
        self.nodes, self.down, self.asked = {h.name: h.name for h in ALL}, set(down), 0
        self.waits = False  # for answers

    def ask(self, *_: object) -> dict[str, str]:
        return dict.fromkeys(sorted(self.down), "no route")

    def begin(self, names: Iterable[str]) -> "Answers":
        self.asked += 1
        return self

    def is_open(self) -> bool:
        return self.waits

    def end(self, question: object) -> dict[str, str]:
        return self.ask()


def place_on(there: Answers, hosts: Sequence[Host] = ALL, ranks: int = 4, **more: Any) -> Placement:
    """Return the hosts of a job that are chosen for its first attempt."""
    order = Order(ranks, [], hosts=hosts, **more)
    place = Placement(order, there)  # type: ignore[arg-type]
    assert place.choose(never) == ""
    return place


def test_hosts_of_the_next_attempt() -> None:
    """As many as are needed; a spare one takes the place of one that is gone, and it returns."""
    there = Answers()
    place, elastic = place_on(there, least=4), place_on(there, least=2)
    assert (place.used, place.ranks, place.nodes) == (ALL[:2], 4, list("aabb"))
    assert place.summary == "4 of 4 ranks on a:2,b:2"
    there.down = {"a"}
    assert place.choose(never) == ""
    assert place.summary == "4 of 4 ranks on b:2,c:2 (a: no route)"
    there.down = {"a", "b"}
    assert place.choose(never) == "hosts for 2 ranks, of 4 at least: a: no route; b: no route"
    assert elastic.choose(never) == ""
    assert elastic.used == ALL[2:]
    there.down = {"b"}
    assert elastic.choose(never) == ""
    assert elastic.used == [ALL[0], ALL[2]]


def test_a_host_on_which_no_rank_begins_is_left_out_once() -> None:
    place = place_on(Answers(), ALL[:2])
    for _ in range(placement.SILENT):
        assert place.ranks == 4
        place.settle(False, [rank("0", "a"), rank("1", "a")], ["0", "1"])
        assert place.choose(never) == ""
    assert place.summary == "2 of 4 ranks on a:2 (b: no rank has begun there)"
    place.settle(True, [rank("0", "a")], ["0"])
    assert place.choose(never) == ""
    assert place.ranks == 4


def test_a_quiet_job_s_hosts_are_asked() -> None:
    """One that does not answer twice is lost; one that answers meanwhile is not."""
    there = Answers()
    place = place_on(there)
    there.down = {"b"}
    assert place.look(placement.QUIET_S - 1, 100.0) == ""
    assert there.asked == 0
    there.waits = True
    assert place.look(30.0, 100.0) == place.look(31.0, 101.0) == ""
    there.waits = False
    assert place.look(32.0, 102.0) == place.look(34.0, 104.0) == ""
    assert there.asked == 1, "not asked again yet"
    there.down = set()
    assert place.look(42.0, 112.0) == place.look(44.0, 114.0) == ""
    there.down = {"b"}
    assert place.look(54.0, 124.0) == place.look(56.0, 126.0) == place.look(66.0, 136.0) == ""
    assert place.look(68.0, 138.0) == "b does not answer: no route"
    assert there.asked == 4
    place.settle(True, [], [])
    assert place.look(0.0, 150.0) == ""


def rows(out: Path, epochs: int | None, *paces: tuple[float, float]) -> Run:
    """Return a run that has told of so many epochs after so many seconds."""
    lines = [{"kind": "start", "step": 0, "epochs": epochs}]
    lines += [{"kind": "train", "step": 1, "time_s": s, "epoch": at} for s, at in paces]
    out.mkdir(exist_ok=True)
    (out / METRICS).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    known = {"run": str(out), "size": 0, "resume": "auto", "log_every_s": 1, "spares": []}
    run = Run(known)
    run.last()
    run.close()
    return run


TOLD = "on 6 ranks instead of 4 the run would end about"


@pytest.mark.parametrize(
    ("epochs", "paces", "said"),
    [
        (100, [(10.0, 0.0)], ""),  # no pace is known yet
        (100, [(10.0, 1.0), (20.0, 1.0)], ""),
        (13, [(10.0, 1.0), (40.0, 4.0)], f"{TOLD} 30 s earlier, a restart costs 25 s: saving to"),
        (10, [(10.0, 1.0), (40.0, 4.0)], f"{TOLD} 20 s earlier, a restart costs 25 s: staying"),
        (None, [(10.0, 1.0), (40.0, 4.0)], f"{TOLD} 0 s earlier, a restart costs 25 s: staying"),
    ],
)
def test_hosts_that_are_back(
    tmp_path: Path, epochs: int | None, paces: list[tuple[float, float]], said: str
) -> None:
    """A job moves if it gains more than that costs; one answer is not enough, and it tells once."""
    there = Answers("b")
    place = place_on(there, ranks=6)
    assert place.used == [ALL[0], ALL[2]]
    back, run = HostReturn(place), rows(tmp_path / "run", epochs, *paces)
    back.begin(75.0)
    assert back.look(None, 90.0) == ""
    there.down = set()
    looks = [back.look(run, 100.0 + 2 * k) for k in range(30)]
    there.down = {"b"}
    looks += [back.look(run, 160.0 + 2 * k) for k in range(20)]
    told = [look for look in looks if look]
    assert len(told) == bool(said)
    assert said in "".join(told)
    assert back.asked == ("saving" in said)
    place.settle(True, [], [])
    back.begin(300.0)
    assert not back.asked


def found_back(place: Placement, times: range) -> list[list[str]]:
    """Return the hosts that are back when they are asked at these times."""
    back = HostReturn(place)
    return [names for k in times if (names := back.back(float(k)))]


def test_a_host_where_no_rank_begins_is_not_back() -> None:
    """It answers all the time."""
    place = place_on(Answers("b"), ranks=6)
    place.remote.down = set()  # type: ignore[attr-defined]
    place.trouble = {"b": placement.NONE_BEGUN}
    assert found_back(place, range(0, 200, 5)) == []
    place.trouble = {"b": "no route"}
    assert found_back(place, range(200, 235, 5)) == [["b"]]
    assert place.ranks_with(["b"]) == 6


def test_hosts_that_are_new(tmp_path: Path) -> None:
    """A job moves to hosts that its file has since; with ``-n`` it keeps to so many ranks."""
    file = tmp_path / "hosts"
    file.write_text("a:2\n")
    known = find_hosts(str(file), None)
    again = partial(find_again, str(file), None, known)
    grows, keeps = (place_on(Answers(), known, 2, again=again, grows=k) for k in (True, False))
    assert grows.used == keeps.used == ALL[:1]
    file.write_text("a:2\nb:2\n")
    assert found_back(grows, range(100, 135, 5)) == [["b"]]
    assert found_back(keeps, range(100, 135, 5)) == []
    assert grows.ranks_with(["b"]) == 4
    assert grows.choose(never) == ""
    assert grows.summary == "4 of 4 ranks on a:2,b:2"
    file.write_text("a:0 b\n")  # as an editor may leave it for a moment
    assert grows.choose(never) == ""
    assert grows.used == ALL[:1], "as at first"


def test_a_move_that_does_not_start_is_taken_back() -> None:
    """Once: what refuses all ranks with the new hosts may be gone at a later start."""
    place = place_on(Answers(), ALL[:2])
    place.settle(False, [], [])
    assert place.choose(never) == ""
    place.used = ALL[:1]
    place.settle(True, [], [])
    for summary in ("4 of 4 ranks on a:2,b:2", "2 of 4 ranks on a:2 (b: no rank has begun there)"):
        assert place.choose(never) == ""
        assert place.summary == summary
        place.settle(False, [], [])
    assert place.choose(never) == ""
    assert place.ranks == 4


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
