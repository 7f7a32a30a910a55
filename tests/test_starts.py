"""What a rank of a plain job opens as it starts: a file of a shared file system takes long."""

import re
from pathlib import Path

import pytest
from launch import ROOT, run

MOST = 118  # files of the package and of its cache that a rank opens

# A file that is not there is none: without compiled modules, each import looks for one first.
COUNTING = f"""
import gc, os, runpy, sys
opened = []

def note(event, args):
    if event == "open" and isinstance(args[0], str) and os.path.isfile(args[0]):
        path = os.path.realpath(args[0])
        if path.startswith({str(ROOT / "mpips")!r}) or path.endswith(".o"):
            opened.append(path)

sys.addaudithook(note)
try:
    runpy.run_module("mpips.train", run_name="__main__", alter_sys=True)
finally:
    sys.stdout.write(f"opened {{len(opened)}}\\n")
    slow = [name for name in ("h5py", "numpy.ma") if name in sys.modules]
    sys.stdout.write(f"imported {{slow}}\\n")
    looked_at = len(gc.get_objects())
    sys.stdout.write(f"collects {{gc.isenabled()}} {{gc.get_freeze_count()}} {{looked_at}}\\n")
    sys.stdout.flush()
"""


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_ranks_of_a_plain_job_start_lightly(mode: str, tmp_path: Path) -> None:
    job = ["-c", COUNTING, "--mode", mode, "--steps", "2", "--out"]
    run(2, [*job, "compiling"], tmp_path).check()
    for name in ("counted", "again"):  # a job that compiles beside this one puts the bundle off
        done = run(2, [*job, name], tmp_path).check()
        counts = [int(count) for count in re.findall(r"^opened (\d+)$", done.output, re.MULTILINE)]
        assert len(counts) == 2
        if max(counts) <= MOST:
            break
    assert max(counts) <= MOST
    writes = 1 if mode == "async" else 2  # ranks, whose parameters go into a checkpoint
    assert done.output.count("imported ['h5py']") == writes, "it takes long"
    assert done.output.count("imported []") == 2 - writes
    collects = re.findall(r"^collects (\w+) (\d+) (\d+)$", done.output, re.MULTILINE)
    assert len(collects) == 2
    for enabled, kept, looked_at in collects:
        assert enabled == "True"
        assert int(kept) > 2 * int(looked_at), "what is imported is no garbage"
