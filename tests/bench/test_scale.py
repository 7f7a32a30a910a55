"""``python -m mpips.bench --scale``: its fits, its files, its table and picture, quick runs."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import launch
import numpy as np
import pytest

from mpips.bench import growth, plot
from mpips.bench.__main__ import main
from mpips.bench.fit import Line, fit_line, power
from mpips.bench.points import Memory, Point, Points, Series, by_series, join, read
from mpips.errors import UserError
from mpips.report import drawing
from mpips.train import LAUNCHED

SCALE = ["-m", "mpips.bench", "--scale"]
SIZES = [64 << 10, 1 << 20, 16 << 20, 256 << 20]
FACTS = {
    "date": "2026-01-01T00:00:00+00:00", "cpu": "Abacus", "cores": 8, "mpi": "MPICH 5",
    "python": "3.11", "numpy": "2.0", "numba": "0.60", "mpips": "0.1.0",
}  # fmt: skip

# Fits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fixed_s", "per_byte_s"), [(1e-5, 1e-10), (1e-2, 1e-12), (1e-7, 1e-9), (0, 1e-9), (1e-3, 0)]
)
def test_a_line_is_found_again(fixed_s: float, per_byte_s: float) -> None:
    line = fit_line(SIZES, [fixed_s + per_byte_s * x for x in SIZES])
    assert line is not None
    assert [line.fixed_s, line.per_byte_s] == pytest.approx([fixed_s, per_byte_s], 1e-9, 1e-16)
    assert line.worst == pytest.approx(1)
    assert line.at(1000) == pytest.approx(fixed_s + 1000 * per_byte_s)


def test_both_parts_survive_noise() -> None:
    """The smallest times have as much to say as the largest."""
    rng = np.random.default_rng(3)
    sizes = np.repeat(SIZES, 25)
    times = (2e-5 + 1e-10 * sizes) * rng.normal(1, 0.1, sizes.size)
    line = fit_line(sizes.tolist(), times.tolist())
    assert line is not None
    assert line.fixed_s == pytest.approx(2e-5, rel=0.1)
    assert line.per_byte_s == pytest.approx(1e-10, rel=0.1)
    assert 1.1 < line.worst < 1.6


def test_no_part_is_negative() -> None:
    falling = fit_line([1, 2, 4], [4.0, 2.0, 1.0])
    steep = fit_line([1, 2, 4], [1.0, 4.0, 16.0])
    assert falling is not None
    assert steep is not None
    assert (falling.per_byte_s, steep.fixed_s) == (0, 0)
    assert falling.fixed_s == pytest.approx(1.75 / (1 / 16 + 1 / 4 + 1))  # least relative errors
    assert falling.worst == pytest.approx(max(4 / falling.fixed_s, falling.fixed_s))
    assert 1 < steep.per_byte_s < 4


def test_one_size_makes_no_line() -> None:
    assert fit_line([8, 8], [1.0, 2.0]) is None


@pytest.mark.parametrize("p", [-1.0, 0.0, 0.5, 1.0, 2.0])
def test_a_power_is_found_again(p: float) -> None:
    assert power([1, 2, 3, 7], [5 * w**p for w in (1, 2, 3, 7)]) == pytest.approx(p, abs=1e-12)


def test_of_what_is_0_no_power_is_known() -> None:
    assert power([1, 2, 4], [0, 2.0, 8.0]) == pytest.approx(2)
    assert power([1, 2], [0, 2.0]) is None
    assert power([3, 3], [1.0, 2.0]) is None


# Files ---------------------------------------------------------------------------------------


def made(mode: str, ranks: int, servers: int, fixed_s: float, per_byte_s: float) -> list[Point]:
    """Return points of a line, in a world whose ranks have a core each."""
    line, series = Line(fixed_s, per_byte_s), Series(mode, 1, ranks, servers, False)
    return [Point(series, size, line.at(size)) for size in SIZES]


def kept(workers: int, beyond: int, nodes: int = 1) -> Memory:
    return Memory(1, nodes, workers + 1, 1, 1 << 20, beyond)


POINTS = Points(
    (FACTS,),
    (
        *made("async", 2, 1, 1e-5, 1e-10),
        *made("async", 5, 1, 4e-5, 4e-10),
        *made("sync", 2, 0, 2e-6, 5e-11)[:2],
        *made("sync", 1, 0, 0, 4e-11)[:1],
    ),
    (kept(1, 70_000_000), kept(4, 70_400_000), kept(4, 81_000_000, nodes=5)),
    ("async, 1 of 5 ranks, 1.1 GB: a step would take 7 s",),
)
TEXT = """\
ms per step, in which every worker makes one
mode   hosts  ranks  servers    64 KB  1.0 MB  16.8 MB  268.4 MB
async      1      2        1   0.0166   0.115     1.69      26.9
async      1      5        1   0.0662   0.459     6.75       107
sync       1      1        0  0.00262
sync       1      2        0  0.00528  0.0544

ms per step as a fixed part and one for each MB, fitted
mode   hosts  ranks  servers    fixed  per MB  per MB and worker  off by at most
async      1      2        1   0.0100   0.100              0.100          x 1.00
async      1      5        1   0.0400   0.400              0.100          x 1.00
sync       1      2        0  0.00200  0.0500             0.0250          x 1.00

growth with the number of workers, w
case                     workers   fixed  per byte
async, 1 host, 1 server  1 4      w^1.00    w^1.00

MB in use by a server beyond its shard, 1 server
pushes by  hosts  parameters  1 worker  4 workers
loads          1      1.0 MB      70.0       70.4
messages       1      1.0 MB                 81.0

left out: async, 1 of 5 ranks, 1.1 GB: a step would take 7 s
no part of a step grows faster than linearly with the workers (w^1.25 at most): \
ok, w^1.00 in async, 1 host, 1 server
the memory of a server does not grow with the workers (2 MB + 10% at most): \
ok, 70.0 MB beyond its shard with 1 worker, 70.4 MB with 4 (1.0 MB, pushes by loads)
"""


def write(path: Path, points: Points) -> Path:
    path.write_text(json.dumps(points.to_json()))
    return path


def test_points_go_through_a_file(tmp_path: Path) -> None:
    assert read(write(tmp_path / "points.json", POINTS)) == POINTS


def test_a_file_has_the_time_of_a_step_and_of_a_push() -> None:
    rows = {(row["ranks"], row["size"]): row for row in POINTS.to_json()["times"]}
    row = rows[5, 1 << 20]
    assert set(row) == {*Series._fields, "size", "step_s", "push_s"}
    assert row["push_s"] == pytest.approx(row["step_s"] / 4)


def test_files_are_joined_by_their_medians() -> None:
    point = made("sync", 2, 0, 1e-5, 0)[0]
    parts = [
        Points((FACTS | {"date": str(k)},), (replace(point, step_s=seconds),), (used,), ("note",))
        for k, (seconds, used) in enumerate(
            [(3.0, kept(1, 5)), (1.0, kept(1, 7)), (2.0, kept(2, 9))]
        )
    ]
    joined = join([*parts, replace(POINTS, times=(), memory=(), left_out=(), quick=True)])
    assert [p.step_s for p in joined.times] == [2.0]
    assert [(m.workers, m.beyond) for m in joined.memory] == [(1, 6), (2, 9)]
    assert len(joined.machines) == 1, "they differ in their dates only"
    assert joined.left_out == ("note",)
    assert joined.quick


@pytest.mark.parametrize("name", ["mpi", "cpu"], ids=["library", "processor"])
def test_what_cannot_be_compared_is_not_joined(name: str) -> None:
    other = replace(POINTS, machines=({**FACTS, name: "Another"},))
    with pytest.raises(UserError, match=f"Another.*, expected the same {name}; join those"):
        join([POINTS, other])


def test_no_points_at_all_are_joined_to_none() -> None:
    assert join([]) == Points()
    assert "not checked" in growth.text(join([]))


def test_series_are_in_order() -> None:
    shuffled = POINTS.times[::-1]
    assert list(by_series(shuffled)) == sorted({p.series for p in shuffled})
    assert all(list(times) == sorted(times) for times in by_series(shuffled).values())


# Table and verdicts --------------------------------------------------------------------------


def test_the_table() -> None:
    assert growth.text(POINTS) + "\n" == TEXT


def test_a_quick_run_is_not_judged() -> None:
    shown = growth.text(replace(POINTS, quick=True)).splitlines()
    assert shown[-1] == "not judged: small sizes in few repeats"
    assert not any("ok" in line for line in shown)


def times_verdict(*times: Point) -> str:
    return growth.judge(Points(times=times))[0]


@pytest.mark.parametrize(
    ("fixed", "per_byte", "verdict"),
    [(0.5, 1.2, "ok, w^1.20"), (0.0, 2.0, "MISSED, w^2.00"), (1.5, 1.0, "MISSED, w^1.50")],
)
def test_a_part_that_grows_faster_than_linearly(
    fixed: float, per_byte: float, verdict: str
) -> None:
    times = [p for w in (2, 4, 8) for p in made("sync", w, 0, 1e-5 * w**fixed, 1e-10 * w**per_byte)]
    assert f": {verdict} in sync, 1 host" in times_verdict(*times)


def test_worlds_that_share_cores_are_compared_among_themselves() -> None:
    """A wait costs more there: that is a step up, and no growth with the workers."""
    free, crowded = made("sync", 2, 0, 1e-6, 1e-10), made("sync", 4, 0, 1e-4, 2e-10)
    crowded = [replace(p, series=p.series._replace(crowded=True)) for p in crowded]
    assert "not checked" in times_verdict(*free, *crowded)
    more = [replace(p, series=p.series._replace(ranks=8), step_s=2 * p.step_s) for p in crowded]
    assert "ok, w^1.00 in sync, 1 host, ranks share cores" in times_verdict(*crowded, *more)


def test_a_round_of_one_rank_is_compared_to_none() -> None:
    times = [*made("sync", 1, 0, 1e-7, 1e-12), *made("sync", 2, 0, 1e-4, 1e-9)]
    assert "not checked" in times_verdict(*times)


def memory_verdict(*memory: Memory) -> str:
    return growth.judge(Points(memory=memory))[1]


def test_memory_that_grows() -> None:
    least = kept(1, 50_000_000)
    assert "ok, 50.0 MB" in memory_verdict(least, kept(7, 57_000_000))
    missed = memory_verdict(least, kept(2, 57_100_000), kept(7, 50_000_000))
    assert "MISSED, 50.0 MB beyond its shard with 1 worker, 57.1 MB with 2 (1.0 MB" in missed


def test_memory_is_compared_where_all_else_is_the_same() -> None:
    one, many = kept(1, 1), kept(7, 10**9)
    others = [replace(many, size=2 << 20), replace(many, hosts=2), replace(many, nodes=8)]
    others.append(replace(many, servers=2, ranks=9))
    assert "not checked" in memory_verdict(one, *others)


# The picture ---------------------------------------------------------------------------------


def test_the_picture(tmp_path: Path) -> None:
    hosts = [replace(p, series=p.series._replace(hosts=2)) for p in made("sync", 4, 0, 1e-4, 1e-8)]
    points = replace(POINTS, times=(*POINTS.times, *hosts))
    for name in ("a.svg", "b.svg", "c.png"):
        plot.draw(points, tmp_path / name)
    svg = (tmp_path / "a.svg").read_text()
    assert len(svg) < 60_000
    words = re.findall(r">([^<>\n]+)</text>", svg)
    shown = ("time per step, ms", "268.4 MB", "5 ranks", "2 ranks, 1 host", "4 ranks, 2 hosts")
    assert set(shown) <= set(words), words
    assert svg == (tmp_path / "b.svg").read_text(), "the same points, the same picture"
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"expected matplotlib .*; pip install 'mpips\[report\]'"):
        drawing.check(tmp_path / "a.svg")


# The command line ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--scale", "--plot", "a.jpg"],
            "--plot a.jpg, expected a name that ends in .svg or",
        ),
        (["--scale", "--plot", "no/a.svg"], "--plot no/a.svg, expected a file in a folder"),
        (["--from", "a.json"], "--from without --scale, expected --scale too"),
        (["--plot", "a.svg"], "--plot without --scale, expected --scale too"),
        (["--scale", "rounds", "rules"], "--scale and rounds rules, expected one command for each"),
        (["--scale", "--from", "a.json"], "a.json: No such file or directory, expected a file to"),
        (["--scale", "--from", "rows.json"], "rows.json without the points of --scale, expected"),
        (["--scale", "--from", "text.json"], "text.json without the points of --scale, expected"),
    ],
)
def test_mistakes(
    args: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "rows.json").write_text('{"machine": {}, "rows": []}')
    (tmp_path / "text.json").write_text("points")
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    assert main(args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"mpips: {message}", line), line


def driver(*args: str, cwd: Path, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run the command without a launcher."""
    return subprocess.run(
        [sys.executable, *SCALE, *args],
        cwd=cwd,
        env=launch.environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def test_files_are_joined_into_one_table_and_one_file(tmp_path: Path) -> None:
    names = ["a.json", "b.json"]
    for name, mode in zip(names, ("async", "sync"), strict=True):
        some = tuple(p for p in POINTS.times if p.series.mode == mode)
        memory = POINTS.memory if mode == "async" else ()
        write(tmp_path / name, replace(POINTS, times=some, memory=memory))
    done = driver("--from", *names, "--json", "all.json", "--plot", "all.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    heading, _, table = done.stdout.partition("\n")
    assert heading.startswith("Abacus, 8 cores; MPICH 5; mpips 0.1.0")
    assert table == TEXT
    assert read(tmp_path / "all.json") == POINTS
    assert (tmp_path / "all.svg").read_text().rstrip().endswith("</svg>")


def test_the_driver_starts_no_mpi_in_its_own_process(tmp_path: Path) -> None:
    code = "import sys, mpips.bench.scale; print({'mpi4py', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=launch.environment(), cwd=tmp_path, timeout=60,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "set()\n"


# Worlds --------------------------------------------------------------------------------------


def check_points(points: Points, ranks: int, sizes: list[int]) -> None:
    """Check what a world on this machine has measured."""
    mine = [p for p in points.times if p.series.ranks == ranks]
    kinds = [(0, "sync")] + [(1, "async")] * (ranks > 1)
    expected = {(servers, mode, size) for servers, mode in kinds for size in sizes}
    assert {(p.series.servers, p.series.mode, p.size) for p in mine} == expected
    assert all(0 < p.step_s < 10 and p.series.hosts == 1 for p in mine)
    memory = [m for m in points.memory if m.ranks == ranks]
    assert {(m.way, m.size) for m in memory} == {
        *(("loads", size) for size in sizes if ranks > 1),
        *[("messages", max(sizes))] * (ranks > 1),
    }
    assert all(5e6 < m.beyond < 1e9 for m in memory), memory


@pytest.mark.launch
@pytest.mark.long
def test_a_world_measures_itself(tmp_path: Path) -> None:
    done = launch.run(3, [*SCALE, "--quick", "--json", "points.json"], tmp_path).check()
    points = read(tmp_path / "points.json")
    assert points.quick
    check_points(points, 3, [64 << 10, 1 << 20])
    assert done.output.count("ms per step, in which every worker makes one\n") == 1
    assert "not judged" in done.output


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.one_mpi
def test_the_driver_starts_worlds_and_draws(tmp_path: Path) -> None:
    args = ["--quick", "--repeats", "1", "--sizes", "4096,65536"]
    done = driver(*args, "--json", "all.json", "--plot", "all.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    points = read(tmp_path / "all.json")
    for ranks in (2, 3):
        check_points(points, ranks, [4096, 65536])
    assert [line.split(":")[1] for line in done.stderr.splitlines()] == [
        " scale, 2 ranks",
        " scale, 3 ranks",
    ]
    assert (tmp_path / "all.png").stat().st_size > 1000


@pytest.mark.launch
@pytest.mark.one_mpi
def test_a_world_draws_nothing(tmp_path: Path) -> None:
    done = launch.run(2, [*SCALE, "--plot", "a.svg"], tmp_path).check(2)
    assert done.output.count("--plot under mpirun, expected a command without it") == 1


HOARD = """
import json, numpy as np
from mpips.cluster.start import whole_world
from mpips.bench.pushpull import Exchange
from mpips.bench.steps import memory_of_servers
from mpips.bench.vector import make_job
from mpips.cluster.world import Cluster

ranks = Cluster(whole_world(), node_size=NODE)
job = make_job(ranks, 2_000_000, "async", servers=1)
exchange = Exchange(job)
exchange.exchange(3)
before = memory_of_servers(job, exchange, 8_000_000, 1)
hoard = np.ones(6_000_000) if exchange.server else None
after = memory_of_servers(job, exchange, 8_000_000, 1)
if ranks.rank == 0:
    print(json.dumps([before.beyond, after.beyond]))
exchange.free()
ranks.free()
"""


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.parametrize(("node_size", "pool"), [(0, 0), (1, 2)])
def test_the_memory_of_a_server_is_its_own(node_size: int, pool: int, tmp_path: Path) -> None:
    """An array of its own counts; gradients that it reads at the workers' do not."""
    code = HOARD.replace("NODE", str(node_size))
    done = launch.run(4, ["-c", code], tmp_path).check()
    found: Any = re.search(r"^\[\d+, \d+\]$", done.output, re.MULTILINE)
    before, after = json.loads(found[0])
    assert after - before == pytest.approx(48e6, abs=5e6)  # either end may take a huge page
    gradients = 3 * 2 * 8e6
    assert pool * 8e6 < before < 90e6 + pool * 8e6 + gradients / 2, done.output
