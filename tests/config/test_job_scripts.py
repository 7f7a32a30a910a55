"""Every script in jobs/ learns what one process alone learns of as many samples.

Which modes it does so in is shared out.
"""

import json
import math
import re
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from launch import ROOT, environment, run

pytestmark = pytest.mark.launch

SCRIPTS = ("chars_torch", "clicks_torch", "conv_torch", "images_torch", "mlp_jax", "words")
DATA = ("documentation", "make_clicks")  # read or write what jobs train on
RULES = ("lion_rule", "muon")  # see tests/optim/test_own_rules.py
CHARACTERS = 56_000
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def test_no_script_is_left_out() -> None:
    assert {path.stem for path in (ROOT / "jobs").glob("*.py")} == {*SCRIPTS, *DATA, *RULES}


def alone(script: str, *options: str, timeout_s: float = 120) -> float:
    """Return what a script prints of one process, without mpirun."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "jobs" / f"{script}.py"), "--alone", *options],
        env={**environment(), **ONE_THREAD}, timeout=timeout_s, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = re.findall(r"^alone: .*?([\d.]+)", done.stdout, re.M)
    return float(found)


def together(
    script: str, modes: Sequence[str], *options: str, folder: Path, timeout_s: float = 200
) -> dict[str, float]:
    """Run a script in some modes, in one world; returns what each has reached."""
    path, program = (str(ROOT / k) for k in (f"jobs/{script}.py", "tests/jobs/scripts.py"))
    args = [program, str(folder), ",".join(modes), path, *options]
    output = run(4, args, folder, timeout_s, ONE_THREAD).check().output
    found = dict(re.findall(r"^(\w+): (?:accuracy )?([\d.]+)", output, re.M))
    assert set(found) == set(modes)
    return {mode: float(value) for mode, value in found.items()}


def check_digits(script: str, modes: Sequence[str], epochs: int, folder: Path) -> None:
    """Check that the modes learn the digits, as far as few epochs go."""
    options = ("--epochs", str(epochs))
    reference = alone(script, *options)
    assert reference > 0.92, reference
    found = together(script, modes, *options, folder=folder)
    assert min(found.values()) > reference - 0.15, (found, reference)


@pytest.mark.long
@pytest.mark.other_mpi
def test_digits_in_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    check_digits("conv_torch", ("ssp", "local_sgd"), 5, tmp_path)


@pytest.mark.long
@pytest.mark.one_mpi
def test_clicks_in_torch(tmp_path: Path) -> None:
    """Pairs are learnt by embeddings that are tables, which logistic regression cannot tell."""
    pytest.importorskip("torch")
    reference, linear = alone("clicks_torch"), alone("clicks_torch", "--linear")
    assert linear < 0.6 < 0.75 < reference, (linear, reference)
    found = together("clicks_torch", ["async"], folder=tmp_path)
    assert min(found.values()) > reference - 0.1, (found, reference)


@pytest.mark.long
@pytest.mark.one_mpi
def test_digits_in_jax(tmp_path: Path) -> None:
    """It is compiled on each rank, which is most of the time that this takes."""
    pytest.importorskip("jax")
    check_digits("mlp_jax", ("ssp",), 6, tmp_path)


@pytest.mark.long
@pytest.mark.other_mpi
def test_images_in_torch(tmp_path: Path) -> None:
    """Fewer images in fewer files, read from tar files by mpips, in memory alone."""
    pytest.importorskip("torch")
    pytest.importorskip("PIL")
    few = ["figures", "--samples", "3000", "--files", "6"]
    script = str(ROOT / "jobs" / "images_torch.py")
    command = [sys.executable, script, *few]
    subprocess.run(command, cwd=tmp_path, env=environment(), timeout=120, check=True)
    assert len([*(tmp_path / "figures").glob("train-*.tar")]) == 6
    reference = alone("images_torch", str(tmp_path / "figures"), "--epochs", "6")
    assert reference > 0.7, reference
    words = ["--problem", f"{script}:Net", "--dataset", "figures/*.tar", "--lr", "2e-3"]
    words += ["--batch-size", "64", "--epochs", "6", "--mode", "sync", "--out", "run", "--quiet"]
    run(2, ["-m", "mpips.train", *words], tmp_path, 200, ONE_THREAD).check()
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["accuracy"]
    assert found > reference - 0.25, (found, reference)


def entropy(characters: list[int]) -> float:
    """Return the bits a character that are left if one knows how frequent each is."""
    shares = [n / len(characters) for n in Counter(characters).values()]
    return -sum(share * math.log2(share) for share in shares)


@pytest.mark.long
@pytest.mark.one_mpi
def test_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transformer learns far more of them than how frequent each is."""
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(ROOT / "jobs")
    job = runpy.run_path(str(ROOT / "jobs" / "chars_torch.py"))
    known = entropy(job["documentation"](CHARACTERS)[0].text.tolist())
    assert sum(p.numel() for p in job["Transformer"]().parameters()) > 1_000_000
    text = ("--text", str(CHARACTERS))
    reference = alone("chars_torch", *text, timeout_s=400)
    assert reference < known - 1, (reference, known)
    found = together("chars_torch", ["async"], *text, folder=tmp_path, timeout_s=400)
    for mode, bits in found.items():
        assert bits < min(reference + 0.8, known - 0.6), (mode, bits, reference, known)


PAIRS = """
list tuple  int float  minimum maximum  client server  start stop  input output  read write
encode decode  month year  row column  width height  parent child  encoding charset
threads processes  keys values  year day  host port  upper lower  signal handler  left right
"""


@pytest.mark.long
@pytest.mark.other_mpi
def test_words_of_documentation(tmp_path: Path) -> None:
    """Related words get rows near each other: by chance not one pair of twenty would."""
    runpy.run_path(str(ROOT / "jobs" / "documentation.py"))["main"](str(tmp_path / "text.txt"))
    text = runpy.run_path(str(ROOT / "jobs" / "words.py"))["Text"](str(tmp_path / "text.txt"))
    pairs = [pair.split() for pair in re.split(r"  |\n", PAIRS.strip())]
    asked = [pair for pair in pairs if set(text.words).issuperset(pair)]  # modules may be missing
    assert len(asked) >= 15, asked
    words = sorted({word for pair in asked for word in pair})
    args = [str(ROOT / "jobs" / "words.py"), "text.txt", *words, "--count", "20", "--epochs", "6"]
    output = run(4, args, tmp_path, 300, ONE_THREAD).check().output
    near = {
        word: {*found.split(", ")} for word, found in re.findall(r"^(\w+): (.+)$", output, re.M)
    }
    hits = [f"{a} {b}" for a, b in asked if b in near[a] or a in near[b]]
    assert len(hits) >= 0.7 * len(asked), hits
