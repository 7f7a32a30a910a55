"""Job files: reading, writing, and merging with the command line.

``mpips jobs [NAME]`` shows those that come with mpips, or ``--copy DIR`` copies them. Precedence is
command line, job file, saved run (on resume), defaults; no environment variables.
"""

import argparse
import shutil
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mpips.config import OPTIONS, Config, groups
from mpips.config.names import SESSION_FIELDS
from mpips.config.option import HELP_WIDTH, meant
from mpips.config.validation import BESIDE, validate
from mpips.errors import UserError, answer, nearest, unknown

DESCRIPTION = """\
List the job files that come with mpips, one experiment each, or show one. Each runs by its name,
as in `mpirun -n 8 python -m mpips.train digits-sync`, or as a copy that you change.
"""
PACKAGE = Path(__file__).resolve().parent.parent


class Parser(argparse.ArgumentParser):
    """A parser whose errors are UserErrors."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise UserError(f"command line: {message}", "what --help lists")


def verbatim(prog: str, text: str | None, **how: Any) -> Parser:
    """Return a parser that shows `text` as it stands, and takes no abbreviated option.

    Args:
        prog: What the command is called.
        text: What its help begins with.
        **how: Other arguments of argparse's parser.
    """
    as_it_stands = argparse.RawDescriptionHelpFormatter
    how |= {"formatter_class": as_it_stands, "allow_abbrev": False}
    return Parser(prog=prog, description=text, **how)


def split_words(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return a command's own words, and those of a job behind ``--``, None where that is not."""
    words = list(argv)
    if "--" not in words:
        return words, None
    at = words.index("--")
    return words[:at], words[at + 1 :]


def shared_folder(kind: str) -> Path:
    """Return the folder of ``jobs`` or ``slurm`` that comes with mpips: a clone's, or installed.

    Raises:
        UserError: If there is none.
    """
    if (PACKAGE.parent / "setup.cfg").is_file():
        return PACKAGE.parent / kind
    import importlib.metadata  # takes longer to import than all of this room

    for path in importlib.metadata.files("mpips") or ():
        if path.parent.parts[-3:] == ("share", "mpips", kind):
            return Path(str(path.locate())).resolve().parent
    raise UserError(f"no {kind} beside {PACKAGE}", "a clone, or what pip installs")


def shared_files(kind: str) -> dict[str, Path]:
    """Return the files of ``jobs`` or ``slurm`` that come with mpips, by name."""
    found = filter(Path.is_file, sorted(shared_folder(kind).iterdir()))  # not what Python compiles
    return {path.name: path for path in found if path.name != "site.sh"}  # this clone's own


def shared_text(path: Path) -> str:
    """Return the text of such a file; data beside it is named by where it lies here."""
    text = path.read_text()
    if path.suffix == ".toml":
        text = text.replace('"mpips/datasets/', f'"{PACKAGE}/datasets/')
        text = text.replace('"jobs/', f'"{path.parent}/')
    return text


def copy_shared(kind: str, folder: Path) -> list[Path]:
    """Copy the files of ``jobs`` or ``slurm`` to a folder; returns where they are now.

    Raises:
        UserError: If the folder cannot be written, or has a file of such a name that differs.
    """
    copies = {folder / name: path for name, path in shared_files(kind).items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for copy, path in copies.items():
            if copy.exists() and copy.read_text() != shared_text(path):
                raise UserError(f"{copy}, which differs", "a folder without it", "name another")
        for copy, path in copies.items():
            copy.write_text(shared_text(path))
            shutil.copymode(path, copy)
    except OSError as problem:
        got = f"folder {str(folder)!r}: {problem.strerror}"
        raise UserError(got, "one that can be written") from None
    return list(copies)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a job file, or a saved run's ``config.toml``, or a job that comes with mpips, by name.

    Returns:
        The values that it sets, by field name, typed and checked one by one.

    Raises:
        UserError: If the file cannot be read, is not TOML, or holds an unknown key or an illegal
            value. Names the file, and the line of a syntax error.
    """
    path = Path(path)
    if path.suffix.lower() != ".toml":
        known = shared_files("jobs").get(f"{path}.toml")
        if known is not None and not path.exists():
            return _read_values(shared_text(known), str(known))
        remedy = "options begin with -- (see --help)"
        if (path / "config.toml").is_file():
            remedy = f"a run is continued by --resume --out {path}"
        raise UserError(f"job file {str(path)!r}", "a path that ends in .toml", remedy)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"job file {str(path)!r} is a pipe or a device", "a file")
    try:
        return _read_values(path.read_bytes().decode(), str(path))
    except FileNotFoundError:
        near = nearest(path.name, (p.name for p in path.parent.glob("*.toml")))
        near = near or "mpips jobs lists those that come along"
        error = UserError(f"job file {str(path)!r} not found", "an existing file", near)
    except OSError as problem:
        error = UserError(f"job file {str(path)!r}: {problem.strerror}", "a readable file")
    except UnicodeDecodeError as problem:
        error = UserError(f"job file {str(path)!r}: {problem}", "text in UTF-8")
    raise error


def _read_values(text: str, source: str) -> dict[str, Any]:
    """Parse TOML text and check each key and value; `source` is named in errors."""
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as problem:
        remedy = 'text stands in quotes: mode = "sync"' if "Invalid value" in str(problem) else ""
        raise UserError(f"{source}: {problem}", "TOML", remedy) from None
    return {key: _checked_key(key, value, source) for key, value in values.items()}


def _checked_key(key: str, value: Any, source: str) -> Any:
    if key in OPTIONS:
        example = "" if OPTIONS[key].kind is str else "numbers and true/false stand without quotes"
        return OPTIONS[key].check(value, f"{source}: ", example if isinstance(value, str) else "")
    if isinstance(value, dict):
        raise UserError(f"{source}: table [{key}]", "keys without tables", "remove the headline")
    expected = "one of those that --help lists, with _ for -"
    raise UserError(f"{source}: unknown key {key!r}", expected, meant(key, OPTIONS))


def resolve(
    options: Mapping[str, Any],
    job: Mapping[str, Any] | None = None,
    saved: Mapping[str, Any] | None = None,
) -> Config:
    """Merge ``options`` over ``job`` over ``saved`` over the defaults, and validate the result.

    What the mode of the result does not have, or what has no effect beside the other options, is
    refused where it was given for that mode or beside them. Where ``options`` change the mode of
    ``job``, or both that of ``saved``, what they leave behind is dropped, and so is what another
    option leaves without effect.

    Args:
        options: From the command line.
        job: From the job file.
        saved: From the ``config.toml`` of the run that is resumed; its `SESSION_FIELDS` are
            not taken over.

    Raises:
        UserError: If the result is not valid.
    """
    kept = {k: v for k, v in (saved or {}).items() if k not in SESSION_FIELDS}
    job = job or {}
    job_mode = job.get("mode", kept.get("mode", Config.mode))
    mode = options.get("mode", job_mode)
    if mode != job_mode:
        job = _without_leftovers(job, mode)
    kept = _without_leftovers(kept, mode)
    if "epochs" in options:  # a number of steps from before does not override what is said now
        job = {k: v for k, v in job.items() if k != "steps"}
    given = {**job, **options}
    if "epochs" in given:
        kept.pop("steps", None)
    values = {**kept, **given}
    changed = {name for name, need in BESIDE.items() if need.other in options}
    held = {*options, *(set(job) - changed if mode == job_mode else ())}
    idle = {k for k in BESIDE if k not in held and not BESIDE[k].holds(values)}
    config = Config(**{k: v for k, v in values.items() if k not in idle})
    validate(config)
    return config


def _without_leftovers(values: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """Return the values of a job of another mode without what `mode` does not have."""
    return {k: v for k, v in values.items() if OPTIONS[k].fits(v, mode)}


def to_toml(config: Config) -> str:
    """Return the job file of a configuration, by groups; fields that are None are left out."""
    lines: list[str] = []
    for group, options in groups().items():
        values = {o.name: getattr(config, o.name) for o in options}
        text = "".join(_toml_line(k, v) for k, v in values.items() if v is not None)
        lines.append(f"# {group}\n{text}")
    return "\n".join(lines)


def _toml_line(name: str, value: Any) -> str:
    import tomli_w

    if isinstance(value, tuple):
        return f"{name} = {list(value)}\n"
    return tomli_w.dumps({name: value})


def from_toml(text: str, source: str = "job file") -> Config:
    """Return the configuration of a job file's text; the inverse of `to_toml`.

    Raises:
        UserError: If it is not TOML, or not valid; names `source`.
    """
    return resolve({}, _read_values(text, source))


# The command -----------------------------------------------------------------------------------


def make_parser() -> Parser:
    """Build the parser of this command."""
    parser = Parser(prog="mpips jobs", description=DESCRIPTION)
    parser.add_argument("name", nargs="?", metavar="NAME", help="show this job file")
    parser.add_argument("--copy", type=Path, metavar="DIR", help="copy all of them to DIR")
    return parser


def text(argv: Sequence[str]) -> str:
    """Return what a command line asks for.

    Raises:
        UserError: If it is wrong, there is no such job, or DIR cannot be written.
    """
    args = make_parser().parse_args(argv)
    files = {p.stem: p for p in shared_files("jobs").values() if p.suffix == ".toml"}
    if args.copy and args.name:
        raise UserError(f"--copy beside {args.name}", "one of them")
    if args.copy:
        return "".join(f"{path}\n" for path in copy_shared("jobs", args.copy))
    if args.name is None:
        column = max(map(len, files)) + 2
        return "".join(f"{k.ljust(column)}{_about(p, column)}\n" for k, p in files.items())
    name = args.name.removesuffix(".toml")
    if name not in files:
        raise unknown("job", name, files)
    return shared_text(files[name])


def _about(path: Path, column: int) -> str:
    """Return the first sentence of a job file, as far as its first line and ours have it."""
    line = path.read_text().splitlines()[0].removeprefix("#").partition(". ")[0].rstrip(".")
    return textwrap.shorten(line, HELP_WIDTH - column, placeholder=" ...")


def main(argv: Sequence[str]) -> int:
    """Print it; returns the exit code."""
    return answer(text, argv)
