"""Measurements of peers: parameter servers and collectives of other systems.

Each script in this folder runs one peer on this machine, and prints one JSON line for each
measurement. Scripts are run by path, in a virtual environment with the peers' packages, which does
not need mpips: ``pip install torch torchft tensorflow-cpu deepspeed ninja fbgemm-gpu-cpu``, then
``VENV/bin/python torch_rpc.py``.

ps-lite is not included: it is in C++, and its build needs a compiler, protobuf and ZeroMQ. With 1
server and 2 workers on two cores, its dense push and pull of 16.8 MB reached 1.7-2.0 GB/s.
"""

import json
import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.peers.script import ONE_CORE, RATES
from mpips.errors import UserError, unknown

__all__ = ["PEERS", "UNITS", "Peer", "Result", "measure", "missing"]

UNITS = {
    "push+pull": "GB/s", "round": "rounds/s", "mlp": "samples/s", "death": "deaths/s",
    "memory": "MB",
    "zipf-rows": "M rows/s", "uniform-rows": "M rows/s", **dict.fromkeys(ONE_CORE, "M rows/s"),
}  # fmt: skip
LOOK_S = 60.0  # time limit for the start of an interpreter on a slow file system
POLL_S = 0.02
TAIL_LINES = 15

# Prints the names of packages that are missing, without importing any.
LOOK = """
import importlib.util, json, sys
print(json.dumps([n for n in sys.argv[1:] if importlib.util.find_spec(n) is None]))
"""


@dataclass(frozen=True)
class Peer:
    """Another system.

    Attributes:
        script: Python file that measures the system.
        package: Package that the script imports; empty for none.
        measures: Measures of the script, keys of `UNITS`.
        program: Program that must be on ``PATH``; empty for none.
    """

    script: Path
    package: str
    measures: tuple[str, ...]
    program: str = ""


@dataclass(frozen=True)
class Result:
    """One measurement of a peer.

    Attributes:
        peer: A key of `PEERS`.
        version: Version of the peer's package.
        measure: A key of `UNITS`.
        case: Sizes and workers.
        seconds: Median time of one step, in which each worker makes one step, or all one round.
        repeats: Time of one step in each repeat, in seconds.
        rate: Rate of all workers at the median: pushed and pulled bytes, rounds, samples or rows
            per second. For memory, the memory of all workers.
        unit: Unit of `rate`.
    """

    peer: str
    version: str
    measure: str
    case: str
    seconds: float
    repeats: tuple[float, ...]
    rate: float
    unit: str


_HERE = Path(__file__).parent

PEERS = {
    "tensorflow-ps": Peer(
        _HERE / "tensorflow_ps.py", "tensorflow", ("push+pull", "mlp", "zipf-rows", "uniform-rows")
    ),
    "torch-rpc": Peer(_HERE / "torch_rpc.py", "torch", ("push+pull",)),
    "deepspeed-shm": Peer(_HERE / "deepspeed_shm.py", "deepspeed", ("round", "mlp")),
    "torch-ddp": Peer(_HERE / "torch_ddp.py", "torch", ("round", "mlp", "memory")),
    "torchft": Peer(_HERE / "torchft_ddp.py", "torchft", ("mlp", "death")),
    "fbgemm": Peer(_HERE / "fbgemm_rows.py", "fbgemm_gpu", ONE_CORE),
    "plain-c": Peer(_HERE / "plain_c.py", "", ("push+pull", "round"), "cc"),
}


def missing(venv: Path) -> dict[str, str]:
    """Return the peers that cannot run in a virtual environment, with the reasons.

    No package of a peer is imported.

    Raises:
        UserError: If `venv` is no virtual environment, or its interpreter does not work.
    """
    packages = sorted({peer.package for peer in PEERS.values() if peer.package})
    what = f"the interpreter of the peers' virtual environment '{venv}'"
    with tempfile.TemporaryDirectory() as folder:  # empty, so only packages are found
        command = [_interpreter(venv), "-c", LOOK, *packages]
        output = _run(command, Path(folder), what, "a list of packages", LOOK_S)
    absent = _last_json(output, what, "a list of packages", list)
    found = {}
    for name, peer in PEERS.items():
        if peer.package in absent:
            found[name] = f"package {peer.package} is not installed in {venv}"
        elif peer.program and not shutil.which(peer.program):
            found[name] = f"there is no {peer.program} on PATH"
    return found


def measure(
    venv: Path,
    peer: str,
    measure: str,
    *,
    size: int,
    workers: int,
    steps: int,
    repeats: int,
    timeout_s: float,
    cores: Iterable[int] = (),
) -> Result:
    """Measure a peer in its own processes on this machine.

    Args:
        venv: Virtual environment with the peer's package.
        peer: A key of `PEERS`.
        measure: One of the peer's measures.
        size: Bytes of the float32 parameters or of the table's rows; ignored for the MLP.
        workers: Number of workers or ranks, without servers.
        steps: Number of steps of each worker in one repeat.
        repeats: Number of counted repeats, after one repeat to warm up.
        timeout_s: Time limit in seconds, imports included.
        cores: Numbers of the cores that the peer may use. By default, the cores of this process,
            which are too few if a launcher has bound it.

    Raises:
        UserError: If there is no such environment, peer or measure, or if the script fails, prints
            no measurement or exceeds the limit. All its processes are ended.

    Collective: no. Blocks: until the script has ended.
    """
    if peer not in PEERS:
        raise unknown("peer", peer, PEERS)
    if measure not in PEERS[peer].measures:
        raise unknown(f"measure of {peer}", measure, PEERS[peer].measures)
    options = {"measure": measure, "workers": workers, "steps": steps, "repeats": repeats}
    if measure not in ("mlp", "death"):
        options["size"] = size // 4
    if listed := ",".join(map(str, cores)):
        options["cores"] = listed
    words = [f"--{name}={value}" for name, value in options.items()]
    command = [_interpreter(venv), str(PEERS[peer].script), "--attended", *words]
    what = f"peer {peer}, measure {measure},"
    with tempfile.TemporaryDirectory() as folder:
        output = _run(command, Path(folder), what, "a measurement", timeout_s)
    return _result(_last_json(output, what, "a measurement", dict), what)


def _interpreter(venv: Path) -> str:
    """Return the path of an environment's Python; its links are not resolved."""
    path = Path(os.path.expanduser(venv)).absolute() / "bin" / "python"
    if not path.is_file():
        packages = "torch torchft tensorflow-cpu deepspeed ninja fbgemm-gpu-cpu"
        remedy = f"make one: python -m venv DIR && DIR/bin/pip install {packages}"
        raise UserError(f"peers' virtual environment '{venv}'", "a folder with bin/python", remedy)
    return str(path)


def _run(command: list[str], folder: Path, what: str, wanted: str, timeout_s: float) -> str:
    """Run a command in `folder`, return its output, and end all its processes.

    The command's input stays open as long as this process lives. Scripts end at the end of input.

    Raises:
        UserError: If the command fails or exceeds the limit.
    """
    environment = {**os.environ, "TMPDIR": str(folder)}  # removed too if the command is killed
    with _text_file() as out, _text_file() as err:
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(f"{what} does not start: {error}", wanted) from error
        with process:
            try:
                in_time = _wait(process.pid, time.monotonic() + timeout_s)
            finally:
                os.killpg(process.pid, signal.SIGKILL)
        code = process.returncode
        if not in_time:
            limit = f"{wanted} within {timeout_s:g} s"
            raise UserError(f"{what} still running", limit, _tail(err))
        if code:
            raise UserError(f"{what} ended with exit code {code}", wanted, _tail(err))
        out.seek(0)
        return out.read()


def _text_file() -> IO[str]:
    """Return an unnamed file, which unlike a pipe can be read while processes hold it open."""
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def _wait(pid: int, end: float) -> bool:
    """Wait for the end of a process; return whether it ended in time.

    The process is not reaped, so its id stays the id of its group until the group is ended.
    """
    how = os.WEXITED | os.WNOWAIT | os.WNOHANG
    while os.waitid(os.P_PID, pid, how) is None:
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True


def _tail(err: IO[str]) -> str:
    """Return the end of a script's stderr, for an error."""
    err.seek(0)
    lines = err.read().splitlines()[-TAIL_LINES:]
    return "\n".join(["its last words:", *lines]) if lines else ""


def _last_json(output: str, what: str, wanted: str, kind: type) -> Any:
    """Return the JSON value in the last line of an output.

    Raises:
        UserError: If the line is no JSON value of this type.
    """
    last = (output.splitlines() or [""])[-1]
    try:
        value = json.loads(last)
    except ValueError:
        value = None
    if not isinstance(value, kind):
        raise UserError(f"{what} printed {last!r}", f"{wanted} as a line of JSON")
    return value


def _result(line: dict[str, Any], what: str) -> Result:
    """Return the measurement in a script's line."""
    try:
        measure = line["measure"]
        repeats = tuple(seconds / line["steps"] for seconds in line["seconds"])
        if measure in ("mlp", "death"):
            shape = f"784-{line['hidden']}-{line['hidden']}-10, batch {line['batch']}"
        else:
            shape = _size_text(line["size"])
        ranks = "ranks" if measure in ("round", "memory") else "workers"
        return Result(
            peer=line["peer"],
            version=line["version"],
            measure=measure,
            case=f"{shape}, {line['workers']} {ranks}",
            seconds=statistics.median(repeats),
            repeats=repeats,
            rate=line[RATES[measure]],
            unit=UNITS[measure],
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        wanted = "a measurement with all its fields"
        raise UserError(f"{what} printed {json.dumps(line)}", wanted, repr(error)) from error


def _size_text(size: int) -> str:
    return f"{size >> 10} KB" if size < 1 << 20 else f"{size / 1e6:.1f} MB"
