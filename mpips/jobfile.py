"""Job files: read, written, and merged with a command line and a saved run.

Precedence is command line, job file, saved run (on resume), defaults; no environment variables.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpips.config import OPTIONS, SESSION_FIELDS, Config, groups
from mpips.errors import UserError, nearest
from mpips.roles import ROUND_MODES
from mpips.validation import validate


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a job file, or a saved run's ``config.toml``.

    Returns:
        The values that it sets, by field name, typed and checked one by one.

    Raises:
        UserError: If the file cannot be read, is not TOML, or holds an unknown key or an illegal
            value. Names the file, and the line of a syntax error.
    """
    path = Path(path)
    if path.suffix.lower() != ".toml":
        remedy = "options begin with -- (see --help)"
        if (path / "config.toml").is_file():
            remedy = f"a run is continued by --resume --out {path}"
        raise UserError(f"job file {str(path)!r}", "a path that ends in .toml", remedy)
    try:
        return _read_values(path.read_bytes().decode(), str(path))
    except FileNotFoundError:
        near = nearest(path.name, (p.name for p in path.parent.glob("*.toml")))
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
    raise UserError(f"{source}: unknown key {key!r}", expected, nearest(key, OPTIONS))


def resolve(
    options: Mapping[str, Any],
    job: Mapping[str, Any] | None = None,
    saved: Mapping[str, Any] | None = None,
) -> Config:
    """Merge ``options`` over ``job`` over ``saved`` over the defaults, and validate the result.

    What the mode of the result does not have is refused where it was given for that mode. Where
    ``options`` change the mode of ``job``, or both that of ``saved``, what they leave behind is
    dropped.

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
    kept, given = _without_leftovers(kept, mode), {**job, **options}
    if "epochs" in given:  # a saved number of steps does not override what is said now
        kept.pop("steps", None)
    config = Config(**{**kept, **given})
    validate(config)
    return config


def _without_leftovers(values: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """Return the values of a job of another mode without what `mode` does not have."""
    none = {"servers"} if mode not in ROUND_MODES and values.get("servers") == 0 else set()
    return {k: v for k, v in values.items() if k not in none and OPTIONS[k].fits(v, mode)}


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
