"""``python -m benchmarks convergence``: its comparisons; tests/config/test_jobs.py has its jobs."""

from dataclasses import replace

from benchmarks.convergence import CASES, SERIAL, RunResult, compared

ONE = RunResult(accuracy=98.0, samples=1000, parameters=50, bytes_sent=4000)


def results(**changed: RunResult) -> dict[str, list[RunResult]]:
    """Return one run of each case, as `ONE` unless changed; codecs send half the bytes."""
    packed = replace(ONE, bytes_sent=2000)
    return {
        name: [changed.get(name, ONE if case.beside in (None, SERIAL) else packed)]
        for name, case in CASES.items()
    }


def test_the_mean_is_aimed_at_and_the_worst_is_shown() -> None:
    """A codec is beside the same rule without one."""
    one = results(**{"none, sgd": replace(ONE, accuracy=96.0)})
    found = {name: runs * 2 for name, runs in one.items()}
    found["ssp"] = [replace(ONE, accuracy=97.0), replace(ONE, accuracy=98.0)]
    found["easgd"] = [replace(ONE, accuracy=96.8), replace(ONE, accuracy=98.0)]
    rows = {row.case.partition(":")[0]: row for row in compared("digits", found)}
    ssp, easgd = rows["digits, ssp"], rows["digits, easgd"]
    assert (ssp.value, ssp.other, ssp.beside) == (97.5, 98.0, "serial, mean of 2")
    assert ssp.case == "digits, ssp: worst 97.00, -0.50 points"
    assert ssp.reached, "half a point less is allowed"
    assert easgd.case == "digits, easgd: worst 96.80, -0.60 points"
    assert not easgd.reached
    assert rows["digits, serial"].reach is None
    packed = rows["digits, onebit, sgd"]
    assert (packed.beside, packed.other) == ("none, sgd, mean of 2", 96.0)
