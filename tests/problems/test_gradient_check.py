"""The gradient checker: it finds what is wrong, and says so of nothing that is right."""

import re
from pathlib import Path

import pytest
from launch import ROOT, python

from mpips import train as program
from mpips.config.command_line import load
from mpips.errors import UserError
from mpips.problems.gradient_check import check_gradient

SLOPES = str(Path(__file__).with_name("slopes.py"))
SMALL = "--hidden 20"
MEMORY = 100_000_000
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "options",
    [
        "", "--activation tanh --hidden 20,10,20", "--problem softmax", "--dataset spirals",
        "--batch-size 1", "--scale 1e4", "--scale 1e-4",
        *(f"--problem {SLOPES}:{name} {SMALL}" for name in ("SinglePrecision", "Absolute")),
    ],
)  # fmt: skip
def test_a_right_gradient(options: str, seed: int) -> None:
    text, error = check_gradient(load([*options.split(), "--seed", str(seed)]), MEMORY)
    assert error is None, text
    assert text.endswith("the gradient is right\n"), text


WRONG = {  # the array that is wrong, and what is said of it
    "Negative": ("w2", "; it is -1 times that"),
    "SumOfTheBatch": ("b1", "; it is 32 times that"),
    "Forgotten": ("b2", ""),
    "DecayInTheLossAlone": ("w1", ""),
    "OneElement": ("b2", ""),
    "NegativeInSingle": ("w1", "; it is -"),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_gradient(name: str, seed: int) -> None:
    words = ["--problem", f"{SLOPES}:{name}", *SMALL.split(), "--seed", str(seed)]
    (array, hint), (text, error) = WRONG[name], check_gradient(load(words), MEMORY)
    for told in (f"in out['{array}'] ", "as the loss changes there", hint):
        assert told in str(error)
    wrong = {line.split()[0]: int(line.split()[3]) for line in text.splitlines()[2:]}
    assert [name for name, count in wrong.items() if count] == [array]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (f"--problem {SLOPES}:Dropout", r"a loss of [\d.]+, then of [\d.]+, expected a finite lo"),
        (f"--problem {SLOPES}:LeftOut", r"left NaN or infinity in out\['b1'\], expected the mean"),
        *((f"--hidden {n}", "takes .*, expected at most 100.0 MB, the memory of the host or")
          for n in (10**7, 10**11)),
    ],
)  # fmt: skip
def test_what_cannot_be_checked(options: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_gradient(load(options.split()), MEMORY)


def test_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One process answers, whoever starts it, and no run is begun."""
    monkeypatch.chdir(tmp_path)
    for name in program.LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    assert program.main(["--check-gradient", "--problem", "softmax"]) == 0
    assert capsys.readouterr().out.count("\n") == 5
    assert program.main(["--check-gradient", "--problem", f"{SLOPES}:Negative"]) == 2
    out, err = capsys.readouterr()
    assert out.count("\n") == 8
    assert re.fullmatch(r"mpips: loss_and_grad .* in out\['w2'\] along it, expected .*\n", err)
    monkeypatch.setenv("PMI_RANK", "1")
    assert program.main(["--check-gradient", "--problem", "softmax"]) == 0
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("package", "name"), [("torch", "modules.py:Affine"), ("jax", "losses.py:loss")]
)
def test_a_login_node_starts_no_mpi(package: str, name: str) -> None:
    """What asks for a job in advance makes the problem too."""
    pytest.importorskip(package)
    words = ["--problem", str(Path(SLOPES).with_name(name)), "--dataset", "spirals"]
    code = (
        "import sys; from mpips.train import main; "
        f"codes = [main([*{words}, *more]) for more in (['--explain', '--ranks', '4'], "
        "['--check-gradient'])]; assert 'mpi4py' not in sys.modules; sys.exit(any(codes))"
    )
    done = python("-c", code, cwd=ROOT)
    assert done.stdout.startswith("mode async, ")
    assert done.stdout.endswith("the gradient is right\n")
