"""Predictions of ``mpips plan`` beside runs in this world: time of a step, mean staleness.

Each job trains a model of a million parameters for some seconds. A gradient sleeps for 60 ms, so
cores are free. The prediction uses the world and the times of the run, and rates of links that are
measured before. The ratio is the predicted value divided by the measured one. On one host, each
half of the ranks counts as a node. The runs are in a subfolder of the current folder, which all
hosts must see. It is removed at the end, unless a job fails.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from mpips.config.command_line import parse_command_line
from mpips.errors import UserError
from mpips.mpi.collective_errors import on_root
from mpips.mpi.world import Cluster
from mpips.planning.simulator.model import PAYLOAD
from mpips.session import run as session
from mpips.session.probe import measure_links
from mpips.tools import plan
from mpips.tools.bench.measure import Options, Row

MODEL = f"{Path(__file__).with_name('sleeping_model.py')}:"
SLOW = 3
JOBS = {
    "async": "--servers 1",
    "async, 2 servers": "--servers 2",
    "async, prefetch": "--servers 1 --prefetch",
    "async, fp16": "--servers 1 --codec fp16 --pull-codec fp16",
    f"async, one {SLOW} x slower": f"--servers 1 --inject-delay 0:{SLOW}",
    "ssp": "--servers 1 --mode ssp",
    "sync": "--mode sync",
    f"sync, one {SLOW} x slower": f"--mode sync --inject-delay 0:{SLOW}",
    "local_sgd, 4 steps": "--mode local_sgd --local-steps 4",
}
EPOCHS = 2  # epochs per rank, so that each worker makes about a hundred steps
QUIET = "--quiet --eval-every 0 --checkpoint-every 0 --log-every 0.2"


def run(cluster: Cluster, options: Options) -> list[Row]:
    """Run and predict each job that is possible in this world. Collective: yes."""
    node_size = 0 if cluster.nodes > 1 else -(-cluster.world // 2)
    ranks = Cluster(cluster.comm, node_size=node_size)
    speeds, rows = measure_links(ranks), list[Row]()
    ranks.free()
    rate, latency = 8e-6 * speeds.bytes_per_s / PAYLOAD, 1e6 * speeds.latency_s
    world = ["--link", f"{rate:.3f}mbit", "--latency", f"{latency:.3f}us"]
    common = [*QUIET.split(), "--node-size", str(node_size), "--problem"]
    common += [f"{MODEL}SleepingModel", "--epochs", "1"] if options.quick else [
        f"{MODEL}Million", "--epochs", str(EPOCHS * cluster.world)
    ]  # fmt: skip
    with _folder(cluster) as folder:
        for number, (name, words) in enumerate(JOBS.items()):
            if "--servers 2" in words and cluster.world < 4:
                continue
            out = folder / str(number)
            _train(cluster, name, [*common, *words.split(), "--out", str(out)])
            case = f"{name}, {cluster.world} ranks on {ranks.nodes} nodes"
            rows += on_root(cluster.comm, partial(_rows, case, out, world))
    return rows


@contextmanager
def _folder(cluster: Cluster) -> Iterator[Path]:
    """Create a folder that all ranks see, and remove it unless a job fails. Collective: yes."""
    name = on_root(cluster.comm, lambda: tempfile.mkdtemp(prefix="mpips-bench-", dir=Path.cwd()))
    yield Path(name)
    cluster.barrier()
    if cluster.rank == 0:
        shutil.rmtree(name)


def _train(cluster: Cluster, name: str, words: list[str]) -> None:
    """Run a job on all ranks. Collective: yes.

    Raises:
        UserError: If the job fails.
    """
    code = session.run(parse_command_line(words), time.perf_counter(), cluster.comm)
    if code:
        raise UserError(f"job {name!r} with exit code {code}", "0")


def _rows(case: str, out: Path, world: list[str]) -> list[Row]:
    """Return the rows that compare a run with its prediction."""
    found = json.loads(plan.write(["--from", str(out), *world, "--json"]))
    run, planned = found["run"], 1e3 * found["step_s"]
    rows = [_row("plan step", case, 1e3 * run["step_s"], "ms", planned)]
    if run["staleness"]:
        stale = found["staleness"]["mean"]
        rows.append(_row("plan staleness", case, run["staleness"], "", stale))
    return rows


def _row(measure: str, case: str, measured: float, unit: str, planned: float) -> Row:
    return Row(measure, case, measured, unit, "planned", planned, planned / measured)
