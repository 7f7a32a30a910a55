"""The page in a real browser, where there is one: Debian's chromium."""

import html
import json
import re
import subprocess
from typing import Any

import pytest
from made import SUMMARY, job, make, row, whole

from mpips.tools.report.__main__ import render
from mpips.tools.report.record import read

WIDTHS = (400, 1600)
# The page in a frame of each width, as windows have at least 500 pixels; and what is seen there.
FRAMES = """<!doctype html>
<html><body>
{frames}
<script>
const seen = {{}};
function look(frame) {{
  const inner = frame.contentDocument, root = inner.documentElement;
  const box = (e) => e.getBoundingClientRect();
  const out = (e) => box(e).right > root.clientWidth + 1 && !e.closest(".scroll, svg");
  const texts = (figures) => figures.flatMap((f) => [...f.querySelectorAll("svg text")]);
  const shown = () => [...inner.querySelectorAll("figure")].filter((f) => box(f).height > 0);
  const found = {{
    width: root.clientWidth, scroll: root.scrollWidth,
    out: [...inner.querySelectorAll("body *")].filter(out).map((e) => e.outerHTML.slice(0, 80)),
    figures: shown().map((f) => [f.id, box(f.querySelector("svg")).width]),
    smallest: Math.min(...texts(shown()).map((t) => box(t).height)),
  }};
  inner.getElementById("against-updates").click();
  found.updates = shown().map((f) => f.id);
  const table = inner.getElementById("sortable");
  const column = (k) => [...table.tBodies[0].rows].map((r) => r.cells[k].textContent);
  const press = (k) => {{ table.querySelectorAll("th button")[k].click(); return column(k); }};
  found.sorted = [press(0), press(0), press(5), table.querySelector("[aria-sort]").textContent];
  return found;
}}
addEventListener("load", () => {{
  for (const frame of document.querySelectorAll("iframe")) seen[frame.width] = look(frame);
  document.title = JSON.stringify(seen);
}});
</script>
</body></html>
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, browser: str) -> dict[str, Any]:
    """What is seen, at both widths, of a page of four runs, one damaged, with names that are long.

    Nothing may be told on the browser's console.
    """
    folder = tmp_path_factory.mktemp("page")
    names = ["1", "10", "2", "a-run-with-a-name-that-is-far-too-long-for-any-column-of-a-table"]
    lines = [*job(0, 2), row("lost", 9.5, 20, rank=3, worker=2), *job(2, 4, resumed=True)]
    make(folder / names[0], lines, SUMMARY, lr=0.1)
    whole(folder / names[1], 2.0, lr=0.2)
    make(folder / names[2], job(0, 3), summary=None, done=False, lr=0.3)
    whole(folder / names[3], 3.0, lr=0.4, problem=f"{'x' * 120}.py:Model")
    text = html.escape(render([read(folder / name, name) for name in names]))
    frame, frames = '<iframe width="{}" height="900" srcdoc="{}"></iframe>', folder / "frames.html"
    frames.write_text(FRAMES.format(frames="\n".join(frame.format(w, text) for w in WIDTHS)))
    words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    done = subprocess.run(
        [*words, "--dump-dom", frames.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.S)
    assert title, done.stdout[-2000:]
    found: dict[str, Any] = json.loads(html.unescape(title[1]))
    return found


@pytest.mark.parametrize("width", WIDTHS)
def test_all_fits_the_width_and_can_be_read(seen: dict[str, Any], width: int) -> None:
    found = seen[f"{width}"]
    assert width - 20 <= found["width"] <= width
    assert found["scroll"] == found["width"]
    assert found["out"] == []
    sizes = dict(found["figures"])
    assert {"training-loss-time", "accuracy-time", "events", "workers", "servers"} <= set(sizes)
    assert not [name for name in sizes if name.endswith(("-samples", "-updates"))]
    assert min(sizes.values()) > 300
    assert found["smallest"] > 9
    assert "training-loss-updates" in found["updates"]
    assert "training-loss-time" not in found["updates"]


def test_the_table_is_sorted(seen: dict[str, Any]) -> None:
    """Numbers as numbers, what is not known last."""
    up, down, losses, by = seen["1600"]["sorted"]
    assert [name[:2] for name in up] == ["1", "2", "10", "a-"]
    assert down == up[::-1]
    assert [text.split()[0] for text in losses] == ["0.5", "0.6667", "1", "1.5"]
    assert by == "eval_loss"
