"""Job scripts made from job files: their text, and the memory and time that they ask for."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import ROOT, train
from runs import summary

from mpips import sbatch
from mpips.config import Config
from mpips.errors import UserError
from mpips.needs import SLACK, STARTUP_S, Measured, Needs, measure, needs
from mpips.sbatch import Request, clock, script

GOLDEN = Path(__file__).parent / "golden"
SCRIPTS = Path("/home/ada/mpips/slurm")
CASES = {
    "digits.sbatch": (
        Request(4, 8, name="digits"),
        Needs(8, 24, server_bytes=3.3e8, worker_bytes=3.9e8, save_s=0.01, seconds=127),
        ["jobs/digits.toml"],
    ),
    "long.sbatch": (
        Request(2, 2, 8, name="long", max_time_s=36000, directives=("--partition=wide",)),
        Needs(0, 4, server_bytes=0, worker_bytes=6.1e10, save_s=35.2, seconds=200_000),
        ["my jobs/long.toml", "--mode", "sync", "--checkpoint-every", "300"],
    ),
    "given.sbatch": (
        Request(1, 2, 1, "4G", "2-00:00:00", directives=("--account=ml", "--constraint=avx512")),
        Needs(1, 1, server_bytes=5e9, worker_bytes=4e9, save_s=2, seconds=1e6),
        ["--lr", "0.1"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_text(name: str) -> None:
    request, need, words = CASES[name]
    assert script(request, need, words, SCRIPTS) == (GOLDEN / name).read_text()


def test_clock() -> None:
    assert [clock(s) for s in (0, 59.2, 3600, 86399, 86400, 200_000)] == [
        *("00:00:00", "00:01:00", "01:00:00", "23:59:59", "1-00:00:00", "2-07:33:20")
    ]


def test_of_a_job_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    words = ["jobs/digits.toml", "--nodes", "2", "--lr", "0.01", "--partition=wide"]
    assert sbatch.main(words) == 0
    text = capsys.readouterr().out
    for line in ("--job-name=digits", "--nodes=2", "--ntasks-per-node=4", "--partition=wide"):
        assert f"#SBATCH {line}\n" in text
    assert "# 2 servers and 6 workers: about" in text
    assert "\ntrain_once jobs/digits.toml --lr 0.01\n" in text
    assert "#SBATCH --time=00:10:00\n" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--servers", "4"], "servers=4 leaves no worker in a world of 4"),
        (["--nodes", "0"], "'0', expected an integer >= 1"),
        (["--lrr", "1"], "unknown option --lrr"),
        (["no.toml"], "job file 'no.toml' not found"),
        (["--dataset", "no.npz"], "no.npz"),
    ],
)
def test_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sbatch.main(words) == 2
    caught = capsys.readouterr()
    assert not caught.out
    assert caught.err.startswith("mpips: ")
    assert message in caught.err


def test_time_is_that_of_the_steps() -> None:
    """Twice the workers take half the time; a number of steps is each worker's own."""
    measured = Measured(parameters=1000, n_train=48_000, data_bytes=0, grad_s=0.01)
    config = Config(servers=1, batch_size=10, epochs=5)
    start = needs(Config(servers=1, steps=1), measured, 1, 2).seconds
    few, many = (needs(config, measured, 1, 1 + n).seconds - start for n in (8, 16))
    assert few == pytest.approx(2 * many, rel=0.01)
    assert few >= 5 * 48_000 / 10 / 8 * 0.01
    fixed = {needs(Config(servers=1, steps=100), measured, 1, n).seconds for n in (2, 5)}
    assert len(fixed) == 1


@pytest.mark.parametrize(
    ("mode", "options", "batches"),
    [
        ("async", {"accumulate": 4}, 4),
        ("sync", {"accumulate": 4}, 4),
        ("local_sgd", {"local_steps": 5}, 5),
        ("easgd", {"tau": 3, "accumulate": 2}, 6),
    ],
)
def test_time_counts_every_batch(mode: str, options: dict[str, Any], batches: int) -> None:
    """An epoch has as many batches in every mode; messages between them are few."""
    measured = Measured(parameters=1000, n_train=48_000, data_bytes=0, grad_s=0.01)
    config = Config(mode=mode, batch_size=10, **options)
    found = needs(config, measured, 1, 2)
    each_s = 48_000 / 10 / found.workers * SLACK * 0.01
    assert found.seconds - STARTUP_S == pytest.approx(config.epochs * each_s, rel=0.01)
    one = needs(dataclasses.replace(config, steps=1), measured, 1, 2)
    assert one.seconds - STARTUP_S == pytest.approx(batches * SLACK * 0.01, rel=0.01)


def test_what_a_node_keeps_for_its_codec_counts() -> None:
    """The residual or, of powersgd, the error and all slots; shared by the ranks of a node."""
    measured = Measured(parameters=10**6, n_train=1000, data_bytes=0, grad_s=0.01)

    def bytes_of(codec: str, nodes: int, ranks: int) -> float:
        return needs(Config(mode="sync", codec=codec), measured, nodes, ranks).worker_bytes

    plain = bytes_of("none", 2, 2)
    assert bytes_of("topk", 2, 2) - plain == 4e6 / 2
    assert bytes_of("powersgd", 2, 2) - plain == 3 * 4e6 / 2
    assert bytes_of("powersgd", 1, 4) == bytes_of("none", 1, 4)


def test_measure_counts_the_data(tmp_path: Path) -> None:
    size = 40_000_000
    np.savez(tmp_path / "data.npz", x=np.zeros((10, size // 40), "f4"), y=np.zeros(10, "f4"))
    config = Config(
        problem="linear", dataset=str(tmp_path / "data.npz"), batch_size=2, test_fraction=0.2
    )
    found = measure(config)
    assert found.n_train == 8
    assert found.parameters == size // 40 + 1
    assert 0 < found.grad_s < 10
    assert found.data_bytes >= 0.9 * size


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "codec"),
    [("async", "none"), ("sync", "none"), ("sync", "onebit"), ("sync", "powersgd")],
)
def test_memory_is_enough_and_not_much_more(mode: str, codec: str, tmp_path: Path) -> None:
    """Against the largest size that ranks of a job of 16 million parameters came to."""
    config = Config(mode=mode, codec=codec, hidden=(4000, 4000), steps=4, checkpoint_every="2steps")
    options = [
        "--mode",
        mode,
        "--codec",
        codec,
        "--hidden",
        "4000,4000",
        "--steps",
        "4",
        "--out",
        "run",
    ]
    options += ["--checkpoint-every", "2steps", "--quiet", "--node-size", "1"]
    train(3, *options, cwd=tmp_path, timeout_s=200).check()
    found = summary(tmp_path / "run")
    need = needs(config, measure(config), 3, 1)
    assert (need.servers, need.workers) == (found["servers"], found["workers"])
    peaks = [mb * 2**20 for mb in found["peak_memory_mb"]]
    told = [need.server_bytes] * need.servers + [need.worker_bytes] * need.workers
    assert all(p <= t <= 2.5 * p for p, t in zip(peaks, told, strict=True)), (peaks, told)


def test_refuses_what_is_no_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sbatch, "TREE", tmp_path)
    with pytest.raises(UserError, match=r"no slurm/common.sh in .*pip install -e"):
        sbatch.write([])
