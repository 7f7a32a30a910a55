"""Job files: reading, writing, and merging with the command line.

``mpips jobs [NAME]`` shows the job files of mpips, and ``--copy DIR`` copies them. The command line
has precedence over the job file, then the saved run (on resume), then the defaults. Environment
variables have no effect.
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
    """Parser that raises a UserError for a wrong command line."""

    def error(self, message: str) -> NoReturn:
        """Raise a UserError instead of printing the usage."""
        raise UserError(f"command line: {message}", "what --help lists")


def verbatim(prog: str, text: str | None, **how: Any) -> Parser:
    """Return a parser that shows `text` unchanged, and accepts no abbreviated options.

    Args:
        prog: Name of the command.
        text: Begin of its help.
        **how: Other arguments of argparse's parser.
    """
    unchanged = argparse.RawDescriptionHelpFormatter
    how |= {"formatter_class": unchanged, "allow_abbrev": False}
    return Parser(prog=prog, description=text, **how)


def split_words(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return the words before ``--``, and the words after it; None for these without a ``--``."""
    words = list(argv)
    if "--" not in words:
        return words, None
    at = words.index("--")
    return words[:at], words[at + 1 :]


def shared_folder(kind: str) -> Path:
    """Return the folder ``jobs`` or ``slurm`` of mpips, in a clone or installed.

    Raises:
        UserError: If there is none.
    """
    if (PACKAGE.parent / "setup.cfg").is_file():
        return PACKAGE.parent / kind
    import importlib.metadata  # slow to import

    for path in importlib.metadata.files("mpips") or ():
        if path.parent.parts[-3:] == ("share", "mpips", kind):
            return Path(str(path.locate())).resolve().parent
    raise UserError(f"no {kind} beside {PACKAGE}", "a clone, or what pip installs")


def shared_files(kind: str) -> dict[str, Path]:
    """Return the files in the folder ``jobs`` or ``slurm`` of mpips, by name."""
    found = filter(Path.is_file, sorted(shared_folder(kind).iterdir()))  # without Python's cache
    return {path.name: path for path in found if path.name != "site.sh"}  # belongs to this clone


def shared_text(path: Path) -> str:
    """Return the text of such a file; relative paths of data in it become absolute."""
    text = path.read_text()
    if path.suffix == ".toml":
        text = text.replace('"mpips/datasets/', f'"{PACKAGE}/datasets/')
        text = text.replace('"jobs/', f'"{path.parent}/')
    return text


def copy_shared(kind: str, folder: Path) -> list[Path]:
    """Copy the files of ``jobs`` or ``slurm`` to a folder, and return the paths of the copies.

    Raises:
        UserError: If the folder cannot be written, or contains a different file of the same name.
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
    """Read a job file, a saved run's ``config.toml``, or a job file of mpips, by its name.

    Returns:
        The values that it sets, by field name, typed and checked one by one.

    Raises:
        UserError: If the file cannot be read, is not TOML, or contains an unknown key or an illegal
            value. The message names the file, and the line of a syntax error.
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
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UserError(f"job file {str(path)!r} is a pipe or a device", "a file")
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
    """Parse TOML text and check each key and value; errors name `source`."""
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

    An option may have no effect, because the mode lacks it or because of another option. It is
    refused if it was given together with these. If ``options`` change the mode of ``job``, values
    of ``job`` that the new mode lacks are dropped; the same holds for ``saved``. Values that lose
    their effect by another new option are dropped too.

    Args:
        options: Values on the command line.
        job: Values in the job file.
        saved: Values in the ``config.toml`` of the resumed run; `SESSION_FIELDS` are ignored.

    Raises:
        UserError: If the result is not valid.
    """
    old = {k: v for k, v in (saved or {}).items() if k not in SESSION_FIELDS}
    job = job or {}
    job_mode = job.get("mode", old.get("mode", Config.mode))
    mode = options.get("mode", job_mode)
    if mode != job_mode:
        job = _without_leftovers(job, mode)
    old = _without_leftovers(old, mode)
    if "epochs" in options:  # new epochs override an earlier number of steps
        job = {k: v for k, v in job.items() if k != "steps"}
    given = {**job, **options}
    if "epochs" in given:
        old.pop("steps", None)
    values = {**old, **given}
    changed = {name for name, need in BESIDE.items() if need.other in options}
    required = {*options, *(set(job) - changed if mode == job_mode else ())}
    without_effect = {k for k in BESIDE if k not in required and not BESIDE[k].holds(values)}
    config = Config(**{k: v for k, v in values.items() if k not in without_effect})
    validate(config)
    return config


def _without_leftovers(values: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """Return the values that a job of `mode` may have."""
    return {k: v for k, v in values.items() if OPTIONS[k].fits(v, mode)}


def to_toml(config: Config) -> str:
    """Return the job file of a configuration, by groups, without fields that are None."""
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
    """Return the configuration in a job file's text; the inverse of `to_toml`.

    Raises:
        UserError: If it is not TOML, or not valid; the message names `source`.
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
    """Return the text that a command line asks for.

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
    """Return the first sentence of a job file, shortened to the width of a line."""
    line = path.read_text().splitlines()[0].removeprefix("#").partition(". ")[0].rstrip(".")
    return textwrap.shorten(line, HELP_WIDTH - column, placeholder=" ...")


def main(argv: Sequence[str]) -> int:
    """Print the text that a command line asks for, and return the exit code."""
    return answer(text, argv)
