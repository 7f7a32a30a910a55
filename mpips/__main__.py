"""Command line of all commands: ``mpips COMMAND ...`` or ``python -m mpips COMMAND ...``."""

import os
import runpy
import sys
from collections.abc import Sequence

COMMANDS = {  # module of each command, with a function ``main(argv)``, and a description
    "train": ("train", "train a model, on the ranks that mpirun or srun starts"),
    "launch": ("launch", "train on ranks that it starts, and starts again when they die or hang"),
    "ps": ("launch.ranks", "show where each rank of a running job is, and what it waits for"),
    "guide": (
        "tools.guide",
        "show a page of the guide: data, checkpoints, several nodes, SLURM, ...",
    ),
    "jobs": ("config.jobfile", "list, show or copy the job files that come with mpips"),
    "results": ("tools.results", "show runs side by side"),
    "report": ("tools.report", "draw runs: curves, staleness, load, time and bytes in one page"),
    "watch": ("tools.watch", "follow runs in a terminal: curves, rates, ranks"),
    "trace": (
        "tools.trace",
        "merge what each rank did when into a timeline, with its critical path",
    ),
    "replay": ("tools.replay", "make an asynchronous run again on one rank, to the same bits"),
    "checkpoint": ("checkpoint", "list, inspect, verify or export the checkpoints of a run"),
    "plan": (
        "tools.plan",
        "predict a job on a cluster: time, bottleneck, staleness; find the cheapest",
    ),
    "sbatch": ("launch.sbatch", "write a job script for SLURM, PBS Pro, LSF or Flux"),
    "doctor": ("tools.doctor", "find out whether a cluster runs mpips well, and what to change"),
    "bench": ("tools.bench", "measure mpips beside the machine's limit and plain MPI"),
}
USAGE = """usage: mpips COMMAND ...

{}
mpips COMMAND --help lists its options. Training starts by mpirun: mpirun -n 8 mpips train.
"""


def main(argv: Sequence[str]) -> int:
    """Run a command; returns its exit code, unless the command exits itself.

    No module is imported before: a rank that trains first installs signal handlers.
    """
    name, *rest = argv or ["--help"]
    if name in COMMANDS:
        sys.argv[1:] = rest
        module = f"mpips.{COMMANDS[name][0]}"
        try:
            try:
                return runpy.run_module(module, run_name="__main__", alter_sys=True)["main"](rest)
            finally:
                print(end="", flush=True)
        except BrokenPipeError:  # the reader of the output, such as ``head``, has ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is written at the exit
            return 141  # as of a command that SIGPIPE has ended
    return _answer(name)


def script() -> int:
    """Run the console script, which finds modules of the current folder like ``python -m``."""
    if not sys.flags.safe_path:
        sys.path[0] = ""
    return main(sys.argv[1:])


def _answer(word: str) -> int:
    """Print a text once, or the error for an unknown command; returns the exit code."""
    from mpips import __version__
    from mpips.errors import Exit, UserError, nearest
    from mpips.train import launched, refuse

    rows = "".join(f"  {name:12s}{text}\n" for name, (_, text) in COMMANDS.items())
    texts = {"--help": USAGE.format(rows), "--version": f"mpips {__version__}\n"}
    texts["-h"] = texts["--help"]
    if word in texts:
        print(texts[word] if launched() in (None, "0") else "", end="")
        return Exit.DONE
    remedy = nearest(word, COMMANDS)
    if word.startswith("-") or word.endswith(".toml"):
        remedy = f"write mpips train {word}"
    error = UserError(f"unknown command {word!r}", f"one of {', '.join(COMMANDS)}", remedy)
    return refuse(error, launched())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
