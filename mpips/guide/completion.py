"""Completion by the shell: ``mpips completion bash``, to be read where the shell starts.

The script that is printed knows all commands and options, so that the shell starts no Python to
complete a word. It is made by shtab, of the extra ``completion``.
"""

import argparse
import sys
from collections.abc import Sequence

from mpips import plan, sbatch, trace, watch
from mpips.__main__ import COMMANDS
from mpips.bench.__main__ import make_parser as bench_parser
from mpips.chaos.__main__ import make_parser as chaos_parser
from mpips.checkpoint.__main__ import make_parser as checkpoint_parser
from mpips.config import OPTIONS
from mpips.config.command_line import FLAGS, QUESTIONS
from mpips.config.jobs import make_parser as jobs_parser
from mpips.config.option import metavar
from mpips.doctor.__main__ import make_parser as doctor_parser
from mpips.errors import UserError, answer, unknown
from mpips.guide.pages import TOPICS
from mpips.launch.__main__ import make_parser as launch_parser
from mpips.replay.__main__ import make_parser as replay_parser
from mpips.report.__main__ import make_parser as report_parser

USAGE = """usage: mpips completion SHELL

Print what lets SHELL (bash, zsh, tcsh) complete the commands and options of mpips:
  mpips completion bash > ~/.local/share/bash-completion/completions/mpips
  mpips completion zsh > ~/.zfunc/_mpips    # a folder of fpath
"""
SHELLS = ("bash", "zsh", "tcsh")
PATHS = ("FILE", "DIR", "FOLDER", "PATH", "VENV", "JOB", "CHECKPOINT")


def make_parser() -> argparse.ArgumentParser:
    """Build one parser of all commands, each with its own options."""
    parser = argparse.ArgumentParser(prog="mpips", add_help=False)
    for flag, text in (("--help", "list the commands"), ("--version", "show the version")):
        parser.add_argument(flag, action="store_true", help=text)
    commands = parser.add_subparsers(metavar="COMMAND")
    parsers = {
        "train": _train(), "launch": launch_parser(), "chaos": chaos_parser(),
        "ps": _ps(),
        "guide": _guide(), "jobs": jobs_parser(), "results": _results(), "report": report_parser(),
        "watch": watch.make_parser(), "trace": trace.make_parser(), "plan": plan.make_parser(),
        "replay": replay_parser(),
        "checkpoint": checkpoint_parser(), "sbatch": sbatch.make_parser(),
        "doctor": doctor_parser(), "bench": bench_parser(), "completion": _completion(),
    }  # fmt: skip
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text)
        commands.choices[name] = parsers[name]
        _complete_paths(parsers[name])
    return parser


def _train() -> argparse.ArgumentParser:
    """Build a parser with the options of a job, for their names and values alone."""
    parser = argparse.ArgumentParser(prog="mpips train", add_help=False)
    parser.add_argument("job", nargs="?", metavar="JOB.toml", help="job file")
    for option in (*OPTIONS.values(), *QUESTIONS.values()):
        if option.kind is bool:
            words = (option.flag, option.negated)
            parser.add_argument(*words, action="store_true", help=option.help)
        else:
            names = [word for word in option.legal if word] or None
            text, shown = option.help.replace("%", "%%"), metavar(option)
            parser.add_argument(option.flag, choices=names, metavar=shown, help=text)
    for flag, text in FLAGS.items():
        parser.add_argument(flag, action="store_true", help=text)
    return parser


def _guide() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mpips guide")
    parser.add_argument("topic", nargs="?", choices=TOPICS, help="what to read about")
    return parser


def _results() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mpips results")
    parser.add_argument("--csv", action="store_true", help="comma-separated values")
    parser.add_argument("folder", nargs="+", metavar="FOLDER", help="a run, or a folder of runs")
    return parser


def _ps() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mpips ps")
    parser.add_argument("folder", metavar="FOLDER", help="of the run")
    return parser


def _completion() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mpips completion")
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    return parser


def _complete_paths(parser: argparse.ArgumentParser) -> None:
    """Mark what is a path, in a parser and in those of its own commands."""
    import shtab

    for action in parser._actions:  # argparse has no other list of them
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _complete_paths(inner)
        elif not action.choices and any(word in str(action.metavar) for word in PATHS):
            action.complete = shtab.FILE  # type: ignore[attr-defined]


def main(argv: Sequence[str]) -> int:
    """Print the script; returns the exit code."""
    if list(argv) in ([], ["--help"]):
        print(USAGE, end="", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    return answer(text, argv)


def text(argv: Sequence[str]) -> str:
    """Return the script for the shell of a command line.

    Raises:
        UserError: If it is not one of `SHELLS`.
    """
    if len(argv) != 1 or argv[0] not in SHELLS:
        raise unknown("shell", " ".join(argv), SHELLS)
    return f"{_script(argv[0])}\n"


def _script(shell: str) -> str:
    """Return the script for a shell.

    Raises:
        UserError: If shtab is not installed.
    """
    try:
        import shtab
    except ImportError:
        remedy = "pip install 'mpips[completion]'"
        raise UserError("no shtab, which makes it,", "its package", remedy) from None
    text: str = shtab.complete(make_parser(), shell=shell)
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
