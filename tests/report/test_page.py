"""The page, its figures and numbers, and the command that makes them."""

import html
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from launch import python
from made import SUMMARY, job, make, row, whole
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from mpips.errors import UserError
from mpips.tools.report import __main__ as command
from mpips.tools.report.__main__ import render, run_table, sections
from mpips.tools.report.curves import GRID, Curve, Point, band
from mpips.tools.report.figures import Figure, groups
from mpips.tools.report.record import Record, read

HOSTILE = """a<b>&"'$x_1$"""
ALWAYS = {"events", "staleness-histogram", "workers", "servers", "bytes", "staleness-time"}
CURVES = {
    f"{name}-{axis}"
    for name in ("training-loss", "held-out-loss", "accuracy")
    for axis in ("time", "samples", "updates")
}


def parsed(page: str) -> ElementTree.Element:
    """Return a page as XML: what is not closed or not escaped is an error."""
    return ElementTree.fromstring(page.removeprefix("<!doctype html>\n"))


def drawn(figure: Figure) -> Axes:
    axes = Canvas().add_subplot()
    figure.draw(axes)
    return axes


def by_name(*runs: Record) -> dict[str, Figure]:
    parts = sections(groups(runs)).values()
    return {figure.name: figure for part in parts for figure in part}


# Figures.


def test_what_is_measured_is_drawn(tmp_path: Path) -> None:
    found = by_name(read(whole(tmp_path / "a"), "a"))
    assert set(found) == ALWAYS | CURVES | {"samples-per-s-time"}
    for axis, step in (("time", 2), ("samples", 100), ("updates", 10)):
        (line,) = drawn(found[f"training-loss-{axis}"]).lines
        assert np.allclose(line.get_xydata(), [(step * k, 1 / k) for k in (1, 2, 3, 4)])
    table = found["training-loss-time"].table
    assert dict(zip(table.heads, table.rows[0], strict=True)) == {
        "run": "a", "lines": 4, "first": 1, "lowest": 1 / 4, "highest": 1, "last": 1 / 4,
        "at s": 8, "at update": 40,
    }  # fmt: skip
    (bars,) = drawn(found["staleness-histogram"]).patches
    assert np.allclose(bars.get_data().values, [25, 50, 12.5, 7.5, 5])
    parts = [patch.get_data() for patch in drawn(found["workers"]).patches]
    tops = [part.values[::2] for part in parts]
    for below, above in zip(tops, parts[1:], strict=False):
        assert np.allclose(above.baseline[::2], below)
    assert np.allclose(tops[0], [3, 4, 5, 0])
    assert np.allclose(tops[4], [4.75, 5.75, 6.75, 2])
    *_, last = found["workers"].table.rows
    assert last == ("a", "server 0 (rank 0)", None, 0, 0, 0, 0, 2.0, 6.0)
    (busy,) = drawn(found["servers"]).patches
    assert np.allclose(busy.get_data().values[::2], 25)
    assert found["servers"].table.rows == [("a", "owner 0 (rank 0)", 800, 40, 0, 2.0, 25.0, 1.5)]
    assert found["bytes"].title == "Bytes moved"


def test_links_of_nodes(tmp_path: Path) -> None:
    """Of nodes with workers and a server, with servers alone, and of rounds without servers."""
    nodes = [{"host": "x", "ranks": [0, 1]}, {"host": "y", "ranks": [2, 3]}]
    workers = [{"rank": k, "bytes_sent": 10**k, "bytes_received": 2 * 10**k} for k in (1, 2, 3)]
    both = {**SUMMARY, "nodes": nodes, "per_worker": workers}
    nodes = [{"host": name, "ranks": [rank]} for rank, name in enumerate("xyz")]
    workers = [{"rank": 2, "bytes_sent": 400, "bytes_received": 800}]
    servers = [{"rank": 0, "bytes": 30}, {"rank": 1, "bytes": 10}, {"rank": 2, "bytes": 99}]
    apart = {**SUMMARY, "nodes": nodes, "per_worker": workers, "per_server": servers}
    for name, known, wanted, owners in (
        ("a", both, [(10 + 2200, 20 + 1100), (1100, 2200)], 1),
        ("b", apart, [(600, 300), (200, 100), (400, 800)], 3),
        ("c", {**apart, "servers": 0}, [(600, 300), (200, 100), (400, 800)], 0),
        ("d", {**apart, "per_server": []}, [(0, 0), (0, 0), (400, 800)], 0),
    ):
        found = by_name(read(make(tmp_path / name, job(), known), name))
        figure, rows = found["bytes"], found["bytes"].table.rows[1:]
        assert figure.title == "Bytes by link"
        assert [row[2:4] for row in rows] == wanted
        sent, total = (list(patch.get_data().values[::2]) for patch in drawn(figure).patches)
        assert list(zip(sent, total, strict=True)) == [(s, s + r) for s, r in wanted]
        bars = [row[1] for row in found["workers"].table.rows if row[1].startswith("server")]
        assert len(bars) == owners


def test_marks_and_gaps(tmp_path: Path) -> None:
    """A curve is broken between jobs, and what happened is marked on it and in its lane."""
    lines = [*job(0, 2), row("lost", 9.5, 20, rank=3, worker=2), *job(2, 4, resumed=True)]
    found = by_name(read(make(tmp_path / "a", lines), "a"))
    curve, *marks = drawn(found["training-loss-time"]).lines
    assert np.isnan(curve.get_xydata()).any(axis=1).tolist() == [False, False, True, False, False]
    assert [mark.get_gid().partition(":")[2].split()[1] for mark in marks] == [
        *("worker", "the", "resumed", "the")
    ]
    lanes = drawn(found["events"])
    assert (len(lanes.patches), lanes.get_xlabel()) == (2, "seconds")
    assert {line.get_marker() for line in lanes.lines} == {"X", "D", ">"}


def test_runs_lie_over_each_other_and_seeds_are_a_band(tmp_path: Path) -> None:
    runs = [
        read(whole(tmp_path / name, lr + seed / 100, lr=lr, seed=seed), name)
        for lr, seed, name in ((lr, k, f"{lr}-{k}") for lr in (1.0, 2.0) for k in (1, 2, 3))
    ]
    found = groups(runs)
    assert [group.label for group in found] == ["lr 1.0: 3 seeds", "lr 2.0: 3 seeds"]
    axes = drawn(by_name(*runs)["training-loss-updates"])
    assert len(axes.lines) == len(axes.collections) == 2
    first = axes.lines[0].get_xydata()
    assert (first[0, 1], first[-1, 1]) == (1.02, 1.02 / 4)
    assert [line.get_color() for line in axes.lines] == [group.colour for group in found]
    again = [*runs[:2], read(whole(tmp_path / "again", lr=1.0, seed=2), "again")]
    assert [group.label for group in groups(again)] == ["1.0-1", "1.0-2", "again"]


# The page.


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """Eleven runs: one has a name that would be read as something else, one has diverged."""
    folder = tmp_path_factory.mktemp("runs")
    out = whole(folder / HOSTILE, scale=1.5, problem=f"{'x' * 120}</pre><script>.py:A")
    found = [read(out, HOSTILE)]
    found += [read(whole(folder / f"{k}", scale=k, lr=float(k)), f"{k}") for k in range(2, 11)]
    came = {"loss": "nan", "eval_loss": "inf", "staleness": 1}
    found.append(read(make(folder / "diverged", job(), came), "diverged"))
    found[0].missing.append("<img src=x onerror=alert(1)>")
    return found


@pytest.fixture(scope="module")
def page(runs: list[Record]) -> str:
    return render(runs)


def test_the_page_is_whole_and_loads_nothing(page: str) -> None:
    tree = parsed(page)
    assert "4 more, with higher losses" in page
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", page)
    assert not [e for e in tree.iter() if {"src", "onerror", "onclick"} & set(e.attrib)]
    assert [e.tag for e in tree.iter() if e.tag in ("script", "link", "img")] == ["script"]
    assert any(HOSTILE in "".join(e.itertext()) for e in tree.iter("td"))
    ids = [e.attrib["id"] for e in tree.iter() if "id" in e.attrib]
    assert len(set(ids)) == len(ids)
    used = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page))
    assert {a or b for a, b in used} <= set(ids)


def test_every_figure_can_be_read_without_eyes(runs: list[Record], page: str) -> None:
    found = {e.attrib["id"]: e for e in parsed(page).iter("figure")}
    assert set(found) == set(by_name(*runs))
    for figure in found.values():
        assert "".join(figure.find("figcaption").itertext()).strip()
        assert len(figure.find("div[@role='img']").attrib["aria-label"]) > 20
        assert figure.find(".//table/tbody/tr") is not None
        assert figure.find(".//svg") is not None


def test_a_loss_of_zero_is_the_best(tmp_path: Path) -> None:
    table, best = run_table([read(whole(tmp_path / f"{k}", k), f"{k}") for k in range(3)])
    assert {(row, table.heads[at]) for row, at in best} == {(0, "eval_loss"), (0, "accuracy")}


def test_a_run_that_has_nothing(tmp_path: Path) -> None:
    page = render([read(make(tmp_path / "empty", summary=None, done=False), "empty")])
    parsed(page)
    assert "no line of training yet" in page
    assert "not done (not ended)" in page


# The command.


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for k in (1, 2):
        whole(tmp_path / "sweep" / f"{k}", lr=float(k))
    (tmp_path / "sweep" / "3.failed").write_text("exit code 2\n")
    page = tmp_path / "r.html"
    assert command.main([str(tmp_path / "sweep"), "-o", str(page)]) == 0
    (told,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{page}: 3 runs, [\d.]+ kB", told)
    assert "failed (exit code 2)" in page.read_text()


def test_names_and_locales_of_other_encodings(tmp_path: Path) -> None:
    for name in ("b\udcff", "m\xfc"):  # the first one is no text
        whole(tmp_path / name)
    legacy = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for locale in ({}, legacy):
        done = python("-m", "mpips", "report", str(tmp_path), cwd=tmp_path, **locale)
        assert done.stdout.startswith("report.html: 2 runs")
        assert "\u2605 is the best" in (tmp_path / "report.html").read_text("utf-8")
        assert "2 done" not in python("-m", "mpips", "watch", str(tmp_path), **locale).stdout


def test_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    whole(Path("a"))
    Path("none").mkdir()
    Path("file").write_text("")
    for words, error in (
        (["a", "none"], "no run in none, expected folders with config.toml"),
        (["a", "missing"], "no run in missing"),
        (["a", "-o", "missing/r.html"], "missing/r.html: No such file or directory, expected a"),
        (["a", "-o", "none"], "none: Is a directory, expected a place that can be written"),
        (["a", "-o", "/dev/full"], "/dev/full: No space left on device, expected a place"),
        ([], "the following arguments are required: RUN"),
    ):
        assert command.main(words) == 2
        assert error in capsys.readouterr().err
    for module, package in (("matplotlib", "Matplotlib"), ("jinja2", "Jinja2")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(UserError, match=rf"no {package}.*'mpips\[report\]'"):
                command.make(["a"])


# The page in a real browser, where there is one: Debian's chromium.

LOOK = """<script>
addEventListener("load", () => {
  const root = document.documentElement, table = document.getElementById("sortable");
  const box = (e) => e.getBoundingClientRect();
  const out = (e) => box(e).right > root.clientWidth + 1 && !e.closest(".scroll, svg");
  const shown = () => [...document.querySelectorAll("figure")].filter((f) => box(f).height > 0);
  const texts = shown().flatMap((f) => [...f.querySelectorAll("svg text")]);
  const found = {
    scrolled: root.scrollWidth - root.clientWidth, time: shown().map((f) => f.id),
    out: [...document.querySelectorAll("body *")].filter(out).map((e) => e.outerHTML.slice(0, 80)),
    smallest: Math.min(...texts.map((t) => box(t).height)),
  };
  document.getElementById("against-updates").click();
  found.updates = shown().map((f) => f.id);
  const press = (k) => {
    table.querySelectorAll("th button")[k].click();
    return [...table.tBodies[0].rows].map((r) => r.cells[k].textContent);
  };
  found.sorted = [press(0), press(0)];
  document.title = JSON.stringify(found);
});
</script>"""


@pytest.mark.parametrize("width", [500, 1600])
def test_the_page_in_a_browser(page: str, width: int, tmp_path: Path, browser: str) -> None:
    """It fits and can be read; a choice changes figures; the table is sorted; nothing is told."""
    file = tmp_path / "page.html"
    file.write_text(page.replace("</body>", f"{LOOK}</body>"))
    words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    words += [f"--window-size={width},900", "--dump-dom", file.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    found = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", done.stdout, re.S)[1]))
    assert (found["scrolled"], found["out"]) == (0, [])
    assert found["smallest"] > 9
    for axis, others in (("time", ("samples", "updates")), ("updates", ("time", "samples"))):
        assert f"accuracy-{axis}" in found[axis]
        assert not {f"accuracy-{other}" for other in others} & set(found[axis])
    up, down = found["sorted"]
    numbers = [f"{k}" for k in range(2, 11)]
    assert [name for name in up if name in numbers] == numbers, "as numbers"
    assert down == up[::-1]


# Curves.


def curve(values: list[float]) -> Curve:
    made = Curve()
    for k, value in enumerate(values):
        made.add(Point(float(k), k, k, k, value))
    return made


def test_points_and_means() -> None:
    """Means are of equally long stretches, of what is finite; few points stay as they are."""
    made = curve([float(k % 10) if k % 4 else math.nan for k in range(10_000)])
    found = made.means(100)
    assert (made.count, 60 <= len(found) <= 100) == (10_000, True)
    assert (abs(found.value - 5) < 0.5).all()
    assert found.seconds.tolist() == list(range(50, 10_000, 100)), "the middle of each"
    assert len(made.smooth) == GRID
    assert math.isnan(curve([math.nan]).means()[0].value)
    few = curve([1.0, 5.0, 2.0])
    assert [p.value for p in few.smooth] == [1.0, 5.0, 2.0]
    assert few.last == few.points[-1].tolist() == (2.0, 2.0, 2.0, 2.0, 2.0)
    assert curve([]).last is None


def line(*points: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.array(points).T
    return x, y


def test_a_band() -> None:
    """Where two of three curves are, in any order of their points."""
    x, low, mid, high = band(
        [line((0, 0), (10, 10)), line((10, 11), (0, 1)), line((0, 5), (5, 10))]
    )
    assert (x[0], x[-1]) == (0, 10)
    assert np.allclose(low, x)
    assert np.allclose(mid[x > 5], x[x > 5] + 0.5)
    assert np.allclose(mid[x < 5], x[x < 5] + 1)
    assert np.allclose(high[x < 5], x[x < 5] + 5)


@pytest.mark.filterwarnings("error")
def test_a_band_of_curves_that_do_not_meet() -> None:
    one = line((0, 1), (1, 1))
    x, low, _, high = band([one, line((9, 2), (10, 2))])
    assert np.isnan(low[(x > 1) & (x < 9)]).all()
    assert (low[0], high[-1]) == (1.0, 2.0)
    _, low, _, high = band([one, line((0.9, 2), (10, 2))])  # they meet for a hundredth of the way
    assert (low[0], high[-1]) == (1.0, 2.0)
    assert np.isfinite(low).all()
    assert np.allclose(band([one])[2], 1.0)
