"""Options of a plan: world, speeds of machines, failures."""

import dataclasses
import math
import re
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from mpips.config.command_line import RATE as RATES
from mpips.config.command_line import Question
from mpips.config.names import UNITS_S
from mpips.config.option import Option, setting
from mpips.errors import UserError
from mpips.planning.simulator.model import ROUND_COSTS

SECONDS = {"us": 1e-6, "ms": 1e-3, **UNITS_S, "d": 86400, "": 1}
COUNTS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "": 1}
BYTES = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "B": 1, "": 1}
NUMBER = r"[0-9]{1,15}(\.[0-9]{1,9})?"
ONE = rf"[1-9][0-9]{{0,5}}x{NUMBER}"
SLOW = re.compile(rf"({ONE}(,{ONE})*)?")
TIME_FORM = "a time such as 300ms, 0.3 (seconds), 12h or 30d"


def _pattern(units: Iterable[str]) -> re.Pattern[str]:
    return re.compile(rf"(?P<number>{NUMBER})(?P<unit>{'|'.join(units)})")


_plan = partial(setting, "plan")
_time = partial(_plan, pattern=_pattern(SECONDS), form=TIME_FORM, metavar="TIME", numeric=True)
_count = partial(_plan, "", pattern=_pattern(COUNTS), metavar="N", numeric=True, unset="the job's")
_rate = partial(_plan, pattern=RATES, metavar="RATE")


@dataclass(frozen=True)
class Asked:
    """Options of ``python -m mpips plan``; they are no keys of a job file."""

    workers: int = _plan(
        0, "number of workers, in addition to servers", ">= 0", unset="those of the run"
    )
    nodes: int = _plan(
        0, "number of nodes, which ranks fill one after the other", ">= 0",
        unset="one a rank, or those of the run",
    )  # fmt: skip
    link: str = _rate(
        "10gbit", "rate of a node's link, each way", form="a rate such as 100mbit or 25gbit"
    )
    latency: str = _time("50us", "latency of a message between nodes")
    mpi: str = _plan(
        "", "library whose rounds are predicted", legal=tuple(ROUND_COSTS),
        unset="that of the run, or mpich",
    )  # fmt: skip
    step_time: str = _time(
        "", "time in which a worker computes the gradient of a batch",
        unset="measured here, or by the run",
    )  # fmt: skip
    jitter: float = _plan(0.1, "standard deviation of the step time, divided by its mean", ">= 0")
    slow: str = _plan(
        "", "numbers of slow workers, each with the factor by which they are slower", pattern=SLOW,
        form="COUNTxFACTOR[,COUNTxFACTOR...], such as 1x3", metavar="NxF", unset="none",
    )  # fmt: skip
    parameters: str = _count("number of parameters of the model", form="a number such as 25.6M")
    samples: str = _count("number of training samples", form="a number such as 100M")
    sample_bytes: str = _plan(
        "0", "size of a sample, which workers read over the links", pattern=_pattern(BYTES),
        form="a size such as 150kB",
        metavar="SIZE", numeric=True,
    )  # fmt: skip
    storage: str = _rate(
        "", "rate at which all nodes together can read data", form="a rate such as 100gbit",
        unset="no limit",
    )  # fmt: skip
    mtbf: str = _time("", "mean time between failures of a node", unset="none fails")
    restart: str = _time("2min", "time from a failure to the next step")
    simulate: int = _plan(
        0, "number of steps of each worker to simulate", ">= 0",
        unset="1000, or what takes some seconds",
    )  # fmt: skip
    deadline: str = _time("", "with --search: time limit of the whole job", unset="none")

    @property
    def slow_workers(self) -> tuple[tuple[int, float], ...]:
        """Numbers of slow workers, with their factors.

        Raises:
            UserError: If a factor is below 1.
        """
        pairs = [one.split("x") for one in self.slow.split(",") if one]
        found = tuple((int(count), float(factor)) for count, factor in pairs)
        if any(factor < 1 for _, factor in found):
            raise UserError(f"slow {self.slow!r}", "factors >= 1", "write 1x3 for a third as fast")
        return found


ASKED = {field.name: Option.of(field) for field in dataclasses.fields(Asked)}


def quantity(text: str, units: Mapping[str, float], unset: float = 0.0) -> float:
    """Return a number with a unit in its base unit. The command line has checked the text.

    Args:
        text: Number and unit.
        units: Factor of each unit.
        unset: Result for an empty text.
    """
    number = text.rstrip(string.ascii_letters)
    return float(number) * units[text[len(number) :]] if text else unset


def seconds(text: str, unset: float = math.inf) -> float:
    """Return the seconds of a time; `unset` for an empty text."""
    return quantity(text, SECONDS, unset)


def count(text: str) -> int:
    """Return a count; 0 for an empty text."""
    return round(quantity(text, COUNTS))


def rate(text: str) -> float:
    """Return the bytes per second of a rate such as 10gbit; infinite for an empty text."""
    return Question(link=text).bytes_per_s if text else math.inf


def shown_time(value: float) -> str:
    """Return a time as text: ``310 ms``, ``1 min 20 s``, ``2 d 3 h``."""
    if not math.isfinite(value):
        return "never"
    if value < 60:
        scale, unit = (1e6, "us") if value < 1e-3 else (1e3, "ms") if value < 1 else (1, "s")
        return f"{scale * value:.3g} {unit}"
    for large, small, name, part in (
        (86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s"),
    ):  # fmt: skip
        whole, rest = divmod(round(value / small), large // small)
        if whole:
            return f"{whole} {name} {rest} {part}" if rest else f"{whole} {name}"
    return f"{value:.0f} s"
