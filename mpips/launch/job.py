"""SLURM job: start, signals and requeueing of a run.

``slurm/common.sh`` calls ``python -m mpips.launch.job SCRIPT SIGNAL VERB WORDS...`` in the
environment of the ranks, and forwards SLURM's signals. SIGNAL is a signal that arrived earlier, or
empty. Ranks use the Python that is first on PATH.

Environment:
    MPIPS_MAX_REQUEUES: Largest number of times that a job goes back into the queue. Default: 100.
    MPIPS_ELASTIC: With ``sbatch --no-kill``: the least ranks with which a job continues after a
        node has failed. Default: all.
    OMP_NUM_THREADS, SRUN_CPUS_PER_TASK: Cores of a rank. The job scripts set these two, and the
        limits of BLAS and numba, to ``SLURM_CPUS_PER_TASK``.
    SLURM_SUBMIT_DIR: Folder in which the job scripts start.
    SLURM_EXPORT_ENV: Unset by the job scripts: ranks need all variables.
    SLURM_JOB_ID, SLURM_JOB_NAME: Name the default folder of the run.
    SLURM_RESTART_COUNT: How often SLURM has requeued the job.
    SLURM_ARRAY_JOB_ID, SLURM_ARRAY_TASK_ID, SLURM_ARRAY_TASK_COUNT: Job, row and rows of a sweep.
    SLURM_NTASKS, SLURM_JOB_NODELIST: Ranks and nodes of the job.
    SLURM_MEM_PER_CPU: Memory of a core in MB. The job warns if a rank's share is too small.

Messages:
    cannot be requeued: The cluster does not allow it. Use ``chain.sbatch``.
"""

import contextlib
import fcntl
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mpips.checkpoint.run_folder import CONFIG, DONE
from mpips.config.command_line import load, parse_command_line
from mpips.errors import Exit, UserError, complain, counted, write_line
from mpips.launch import verdict
from mpips.launch.folders import remove_left
from mpips.launch.mpirun import TREE
from mpips.launch.order import is_program
from mpips.launch.sbatch import EARLY_S, TIME, read_row, seconds
from mpips.launch.slurm import ask, pick_launcher, requeue, run, shown
from mpips.launch.verdict import TRIES, Try
from mpips.launch.watch import saved_step
from mpips.mpi import signals

KNOWN = os.environ  # variables of SLURM and the site; this module adds those that ranks need
HOW = ("--hosts", "slurm", "--timeout", "0", "--restarts", "100")  # options of mpips.launch
NOTICE_S = 60  # SLURM's default notice of a signal
RANK_MB = 350  # Python and MPI take 300
REQUEUED_S, REPORT_S, POLL_S = 600.0, 600, 0.05
LIBRARY = """\
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(*MPI.Get_library_version().replace("\\x00", " ").split(",")[0].split()[:4])
"""


class Job:
    """This job, in its batch shell.

    Args:
        script: Path of the job script.
        asked: Signal that arrived before this process could handle it; empty for none.

    Raises:
        UserError: If MPIPS_MAX_REQUEUES is not a number.
    """

    def __init__(self, script: str, asked: str) -> None:
        self._script, self._before, self._begin = script, asked, time.monotonic()
        array, task = (KNOWN.get(f"SLURM_ARRAY_{name}_ID", "") for name in ("JOB", "TASK"))
        # The last task of an array has the array's own number as its SLURM_JOB_ID.
        self._id = f"{array}_{task}" if task else KNOWN["SLURM_JOB_ID"]
        self._restart = int(KNOWN.get("SLURM_RESTART_COUNT", "0"))
        most = KNOWN.get("MPIPS_MAX_REQUEUES") or "100"
        if not most.isdecimal():
            raise UserError(f"MPIPS_MAX_REQUEUES {most!r}", "a number")
        self._most = int(most)  # largest number of requeues
        self._out, self._launcher, self._is_queued = Path(), list[str](), False
        self._elastic = ["--elastic", least] if (least := KNOWN.get("MPIPS_ELASTIC")) else []
        self._same = "the same command"  # names the command that continues the run
        self._name = KNOWN.get("SLURM_JOB_NAME", "mpips").replace("/", "-")

    def prepare(self) -> None:
        """Choose the launcher, and print the job's ranks, nodes and versions."""
        library = run("python", "-c", LIBRARY).stdout.strip()
        self._launcher = pick_launcher(library)
        ranks = counted(int(KNOWN.get("SLURM_NTASKS", "1")), "rank")
        where = f"{ranks} on {KNOWN.get('SLURM_JOB_NODELIST')} by {' '.join(self._launcher)}"
        say(f"job {self._id}, restart {self._restart}: {where}")
        cores = int(KNOWN.get("OMP_NUM_THREADS", "1"))
        each_mb = int(KNOWN.get("SLURM_MEM_PER_CPU", "1024")) * cores
        if each_mb < RANK_MB:
            remedy = "give sbatch --mem-per-cpu=1G, or --mem"
            say(f"{each_mb} MB a rank, of which Python and MPI take 300; {remedy}")
        words = "git", "-C", f"{TREE}", "describe", "--always", "--dirty"
        commit = ask(*words, stderr=subprocess.DEVNULL).strip() or "unknown"
        version, place = platform.python_version(), shutil.which("python")
        say(f"Python {version} at {place}, {library}, commit {commit}")
        if self._launcher[0] == "srun":
            # MPICH names its shared memory by job and step, and SLURM's pmix plugin its folders.
            # Files of a killed step on a node break the start of a later step with the same number.
            for _ in range(self._restart):
                ask("srun", "--nodes=1", "--ntasks=1", "--mpi=none", "true")

    def train(self, words: Sequence[str]) -> int:
        """Train, and requeue the job if work is left. Return the exit code.

        The run is in ``--out``, or in a folder with the job's name and number. A program chooses
        the folder of its run itself.
        """
        if is_program(words):
            self._check_time()
            ended = self._start(words, self._elastic)
            is_left = ended == Exit.SAVED or (ended == Exit.FAILED and self._asked)
            return self._requeue() if is_left else ended
        code = self._find_out(words, f"runs/{self._name}-{KNOWN['SLURM_JOB_ID']}")
        if code is None:
            code = self._try(words)
        return self._requeue() if code < 0 else code

    def chain(self, words: Sequence[str]) -> int:
        """Train in ``--out``, or in a folder with the job's name; return the exit code.

        The next job of the chain continues the run.
        """
        code = self._find_out(words, f"runs/{self._name}")
        if code is None and (self._out / DONE).exists():
            say(f"{self._out} is done; for another run give another --job-name")
            return Exit.DONE
        if code is None:
            code = self._try(words)
        if code < 0:
            code = Exit.DONE if self._asked or code == -Exit.SAVED else Exit.FAILED
        return code

    def sweep(self, words: Sequence[str]) -> int:
        """Train as a row of a table says. The number of the row is the number of this array task.

        Args:
            words: The table, a job file, and options. Each run has its own folder in ``--out``.
                When a run ends, results.txt there is written with all runs.
        """
        table, *words = words
        number = KNOWN["SLURM_ARRAY_TASK_ID"]
        default = f"runs/{self._name}-{KNOWN['SLURM_ARRAY_JOB_ID']}"
        folder = parse_command_line(words).options.get("out", default)
        words += (row := read_row(table, int(number)))
        say(f"row {number} of {table}: {shlex.join(row)}")
        Path(folder).mkdir(parents=True, exist_ok=True)
        failed = Path(folder) / f"{number}.failed"
        failed.unlink(missing_ok=True)
        code: int = Exit.FAILED
        try:
            found = self._find_out([*words, "--out", f"{folder}/{number}"], "")
            code = self._try(words, draws=False) if found is None else found
            code = self._requeue() if code < 0 else code
        except UserError as error:
            code = error.code
            raise
        finally:
            if not self._is_queued:
                if code:
                    failed.write_text(f"exit code {code}\n")
                show_rows(Path(folder), int(KNOWN.get("SLURM_ARRAY_TASK_COUNT", "1")))
        return code

    def doctor(self, words: Sequence[str]) -> int:
        """Examine the nodes of this job."""
        return self._start(["-m", "mpips", "doctor", *words])

    @property
    def _asked(self) -> str:
        """The signal that asked this job to end; empty for none."""
        return (signals.received() or self._before).removeprefix("SIG")

    def _find_out(self, words: Sequence[str], default: str) -> int | None:
        """Check the job before it starts, and find the folder of its run.

        Returns:
            The exit code, if the options ask for a text or an evaluation; None for a run.

        Raises:
            UserError: If the command line is wrong, or the time limit is not longer than the
                notice.
        """
        line = parse_command_line(words)
        if line.needs_no_world or line.flags - {"explain"}:
            return subprocess.run(["python", "-m", "mpips.train", *words], check=False).returncode
        config = load(words)
        if line.flags or config.eval_only:
            return self._start(words)
        self._out = Path(config.out or default)
        self._same = f"--out {self._out}"
        self._check_time()
        return None

    def _check_time(self) -> None:
        """Refuse a job whose time limit is not longer than its notice.

        SLURM would requeue such a job again and again. The notice is read from the script or from
        SBATCH_SIGNAL: this process cannot see one on sbatch's command line.

        Raises:
            UserError: If the time limit is too short.
        """
        limit, script = shown(self._id, "TimeLimit"), Path(self._script)
        text = script.read_text(errors="replace") if script.is_file() else ""
        said = re.findall(r"^#SBATCH .*--signal=(.*)", text, re.MULTILINE)
        said += filter(None, [KNOWN.get("SBATCH_SIGNAL")])
        if not said:
            return
        given = re.search(r"@(\d+)", said[-1])
        notice = int(given[1]) if given else NOTICE_S
        least = notice + EARLY_S
        if not TIME.fullmatch(limit) or seconds(limit) > least:
            return
        expected = f"more than {least} s, as the ranks are asked to save {notice} to {least} s"
        remedy = f"give sbatch --time={least // 60 + 5}, or a shorter notice by "
        remedy += "SBATCH_SIGNAL=B:USR1@30 sbatch ..."
        raise UserError(f"a time limit of {seconds(limit)} s", f"{expected} before its end", remedy)

    def _try(self, words: Sequence[str], draws: bool = True) -> int:
        """Train from the newest checkpoint of an earlier try, if there is one.

        Args:
            words: Options of mpips.train.
            draws: Whether to write a report of the run when it has ended.

        Returns:
            The exit code; its negative if work is left.
        """
        words, out = [*words, "--out", str(self._out)], self._out
        if out.is_dir() or self._restart:
            words += ["--resume", "auto"]
        code = self._start(words, self._elastic)
        if code in (Exit.DONE, Exit.FAILED) and draws and (out / CONFIG).exists():
            draw(out)
        if code == 0:
            with contextlib.suppress(OSError):  # the run is done, even if the file stays
                verdict.tries_file(out).unlink()
            say(f"done: {out}")
        if code in (Exit.DONE, Exit.REFUSED) or (code == Exit.FAILED and not self._asked):
            return code
        step = saved_step(out)
        say(f"not done: {f'step {step}' if step >= 0 else 'nothing'} is saved in {out}")
        if self._asked:
            return -code
        if not verdict.gets_no_further(verdict.note(out, Try(self._id, self._restart, step))):
            return -code
        remove_left(Path.cwd())  # folder of a supervisor that was killed
        where = f"no further than step {step}" if step >= 0 else "nothing is saved"
        remedy = f"see the messages above, then submit it again with --out {out}"
        say(f"{where} in {TRIES} tries that ended by themselves: giving up; {remedy}")
        return Exit.FAILED

    def _start(self, words: Sequence[str], how: Sequence[str] = ()) -> int:
        """Run mpips.launch, forward a signal to end, and return the exit code."""
        if self._asked:
            say(f"SIG{self._asked} before the ranks were started")
            return Exit.SAVED  # no run has begun, so none is lost
        how = [*HOW, *how, "--mpirun", " ".join(self._launcher)]
        job = subprocess.Popen(["python", "-m", "mpips.launch", *how, "--", *words])
        handed_on = False
        while job.poll() is None:
            if self._asked and not handed_on:
                say(f"SIG{self._asked}: asking the ranks to save")
                job.send_signal(signals.SIGNALS[0])
                handed_on = True
            time.sleep(POLL_S)
        code = job.returncode if job.returncode >= 0 else 128 - job.returncode
        if self._asked and code > 128:
            code = Exit.SAVED  # the signal arrived before a handler was installed
        remedy = ": if it was killed for memory, give sbatch a larger --mem-per-cpu, or --mem"
        say(f"mpips.launch ended with {code}{remedy if code == Exit.KILLED else ''}")
        return code

    def _requeue(self) -> int:
        """Requeue this job. It keeps its number, and its next start continues the run.

        A job that a user has cancelled is not requeued. The state of such a job is COMPLETING. At
        the time limit the state is the same, but the reason is TimeLimit.
        """
        state, reason = shown(self._id, "JobState"), shown(self._id, "Reason")
        ended = state not in ("", "RUNNING") and reason != "TimeLimit"
        if ended or self._has_restarted():  # elsewhere, if SLURM cannot reach this node
            return self._leave()
        onward = f"go on with {self._same}"
        if self._restart >= self._most:
            times = counted(self._restart, "time")
            say(f"requeued {times}, MPIPS_MAX_REQUEUES is {self._most}; {onward}")
        elif self._is_hurried():
            why = f"asked to save within a minute of its start {TRIES} times: giving up"
            say(f"{why}; give a longer --time or a shorter --signal, and {onward}")
        else:
            ends = signals.count(signal.SIGTERM)
            if requeue(self._id) or self._has_restarted():
                self._is_queued = True
                end = time.monotonic() + REQUEUED_S
                while signals.count(signal.SIGTERM) == ends and time.monotonic() < end:
                    time.sleep(POLL_S)  # until SLURM ends this job
                return self._leave()
            say(f"cannot be requeued; submit it again with {self._same}")
        return Exit.SAVED

    def _is_hurried(self) -> bool:
        """Return whether this try and the last ones had to save soon after they began.

        No other job needed the nodes: the notice is too long for the time limit.
        """
        is_early = time.monotonic() - self._begin <= EARLY_S
        if self._asked != "USR1" or not is_early or not (self._out / CONFIG).is_file():
            return False
        if shown(self._id, "PreemptTime") not in ("", "None"):
            return False
        this = Try(self._id, self._restart, saved_step(self._out), hurried=True)
        return verdict.is_hurried(verdict.note(self._out, this))

    def _has_restarted(self) -> bool:
        """Return whether SLURM has requeued this job since it began."""
        return int(shown(self._id, "Restarts") or 0) > self._restart

    def _leave(self) -> int:
        """Print why SLURM has ended this job, and return the exit code.

        Either a user has cancelled the job, or SLURM has requeued it: after a node failure, for a
        more urgent job, or on the job's request.
        """
        if self._is_queued or self._has_restarted():
            self._is_queued = True
            say("requeued")
            return Exit.SAVED
        say(f"cancelled; go on with {self._same}")
        return Exit.FAILED


def show_rows(folder: Path, rows: int) -> None:
    """Write the table of a sweep's results, and the report once all rows have ended.

    A lock admits one row at a time. So the last row writes the final table and the report of all
    rows.
    """
    with open(folder / "results.lock", "w") as lock:
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        path = folder / "results.tmp"
        path.write_text(run("python", "-m", "mpips", "results", str(folder)).stdout)
        path.replace(folder / "results.txt")
        if len([*folder.glob(f"*/{DONE}"), *folder.glob("*.failed")]) >= rows:
            draw(folder)


def draw(folder: Path) -> None:
    """Write the report of a run or a sweep that has ended, if the extra for it is installed."""
    words = ["python", "-c", "import jinja2, matplotlib"]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        return
    page = ["-o", str(folder / "report.html")]
    words = ["timeout", f"{REPORT_S}", "python", "-m", "mpips", "report", str(folder), *page]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    say(done.stdout.rstrip() if done.returncode == 0 else f"{done.stdout}no report of {folder}")


def say(text: str) -> None:
    """Print a message of the job with the time."""
    write_line(f"== {time.strftime('%F %T')} {text}")


def main(argv: Sequence[str]) -> int:
    """Run the verb that a job script asks for, and return the exit code."""
    script, asked, verb, *words = argv
    verbs = {"train": Job.train, "chain": Job.chain, "sweep": Job.sweep, "doctor": Job.doctor}
    try:
        job = Job(script, asked)
        job.prepare()
        return verbs[verb](job, words)
    except UserError as error:
        complain(error)
        return error.code


if __name__ == "__main__":
    signals.install()
    code = main(sys.argv[1:])
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.SIGNALS)  # exit removes handlers
    sys.exit(code)
