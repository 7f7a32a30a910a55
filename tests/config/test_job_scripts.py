"""Every script in jobs/ learns in some modes what one process alone learns of as many samples."""

import re
import runpy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from launch import ROOT, python, run
from runs import summary

pytestmark = pytest.mark.launch

SCRIPTS = ("chars_torch", "clicks_torch", "conv_torch", "images_torch", "mlp_jax", "words")
CHARACTERS = 56_000
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def test_no_script_is_left_out() -> None:
    data, rules = {"documentation", "make_clicks"}, {"lion_rule", "muon"}  # the rules: tests/optim
    assert {path.stem for path in (ROOT / "jobs").glob("*.py")} == {*SCRIPTS} | data | rules


def alone(script: str, *options: str, timeout_s: float = 120) -> float:
    """Return what a script prints of one process, without mpirun."""
    words = [str(ROOT / "jobs" / f"{script}.py"), "--alone", *options]
    done = python(*words, timeout_s=timeout_s, OMP_NUM_THREADS="1")
    (found,) = re.findall(r"^alone: .*?([\d.]+)", done.stdout, re.M)
    return float(found)


def together(script: str, mode: str, *options: str, folder: Path, timeout_s: float = 200) -> float:
    """Return what a script has reached in a mode, on four ranks."""
    words = [str(ROOT / "jobs" / f"{script}.py"), "--mode", mode, "--out", str(folder / mode)]
    output = run(4, [*words, *options], folder, timeout_s, ONE_THREAD).check().output
    (found,) = re.findall(rf"^{mode}: (?:accuracy )?([\d.]+)", output, re.M)
    return float(found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "modes", "epochs"),
    [
        pytest.param("conv_torch", ("ssp", "local_sgd"), "5", marks=pytest.mark.other_mpi),
        # It is compiled on each rank, which is most of the time that this takes.
        pytest.param("mlp_jax", ("ssp",), "6", marks=pytest.mark.one_mpi),
    ],
)
def test_digits(script: str, modes: Sequence[str], epochs: str, tmp_path: Path) -> None:
    """As far as few epochs go."""
    pytest.importorskip(script.partition("_")[2])
    reference = alone(script, "--epochs", epochs)
    assert reference > 0.92, reference
    found = [together(script, mode, "--epochs", epochs, folder=tmp_path) for mode in modes]
    assert min(found) > reference - 0.15, (found, reference)


@pytest.mark.long
@pytest.mark.one_mpi
def test_clicks_in_torch(tmp_path: Path) -> None:
    """Pairs are learnt by embeddings that are tables, which logistic regression cannot tell."""
    pytest.importorskip("torch")
    reference, linear = alone("clicks_torch"), alone("clicks_torch", "--linear")
    assert linear < 0.6 < 0.75 < reference, (linear, reference)
    found = together("clicks_torch", "async", folder=tmp_path)
    assert found > reference - 0.1, (found, reference)


@pytest.mark.long
@pytest.mark.other_mpi
def test_images_in_torch(tmp_path: Path) -> None:
    """Fewer images in fewer files, read from tar files by mpips, in memory alone."""
    pytest.importorskip("torch")
    pytest.importorskip("PIL")
    script = str(ROOT / "jobs" / "images_torch.py")
    python(script, "figures", "--samples", "3000", "--files", "6", cwd=tmp_path)
    assert len([*(tmp_path / "figures").glob("train-*.tar")]) == 6
    reference = alone("images_torch", str(tmp_path / "figures"), "--epochs", "6")
    assert reference > 0.7, reference
    words = ["--problem", f"{script}:Net", "--dataset", "figures/*.tar", "--lr", "2e-3"]
    words += ["--batch-size", "64", "--epochs", "6", "--mode", "sync", "--out", "run", "--quiet"]
    run(2, ["-m", "mpips.train", *words], tmp_path, 200, ONE_THREAD).check()
    found = summary(tmp_path / "run")["accuracy"]
    assert found > reference - 0.25, (found, reference)


@pytest.mark.long
@pytest.mark.one_mpi
def test_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transformer learns far more of them than how frequent each is."""
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(ROOT / "jobs")
    job = runpy.run_path(str(ROOT / "jobs" / "chars_torch.py"))
    characters = job["documentation"](CHARACTERS)[0].text.tolist()
    shares = np.unique(characters, return_counts=True)[1] / len(characters)
    known = -float(shares @ np.log2(shares))  # bits of each that are left
    assert sum(p.numel() for p in job["Transformer"]().parameters()) > 1_000_000
    text = ("--text", str(CHARACTERS))
    reference = alone("chars_torch", *text, timeout_s=400)
    assert reference < known - 1, (reference, known)
    bits = together("chars_torch", "async", *text, folder=tmp_path, timeout_s=400)
    assert bits < min(reference + 0.8, known - 0.6), (bits, reference, known)


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
