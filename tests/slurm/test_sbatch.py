"""Job scripts made from job files: their text, and the memory and time that they ask for."""

import dataclasses
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import ROOT, train
from runs import summary, thinned

from mpips.config import Config
from mpips.errors import UserError
from mpips.launch.sbatch import clock, main, make_parser, script, seconds, write
from mpips.planning.needs import SLACK, STARTUP_S, Measured, Needs, measure, needs

SCHEDULERS = ("pbs", "lsf", "flux")
NEED = Needs(1, 3, server_bytes=3.3e8, worker_bytes=3.9e8, save_s=0.4, seconds=127)
TWO_BY_TWO = "--nodes 2 --ntasks-per-node 2 --time 1:00:00 --job-name long"
# What each other scheduler is asked for, for a job with all that a site may want.
HEADS = {
    "pbs": "PBS -N long, -l select=2:ncpus=8:mpiprocs=2:mem=1200MB, -l place=scatter, "
    "-l walltime=3600, -q wide, -A ml",
    "lsf": 'BSUB -J long, -n 16, -R "span[ptile=8] rusage[mem=1200MB/host]", -W 60, -q wide, '
    '-P ml, -Q "85"',
    "flux": "flux: --job-name=long, --nodes=2, --nslots=4, --cores-per-slot=4, --time-limit=3600s, "
    "--queue=wide, --bank=ml",
}


def text_of(options: str, need: Needs, words: list[str]) -> str:
    args = make_parser().parse_args(options.split())
    return script(args, need, words, Path("/home/ada/mpips/slurm"))


def test_text() -> None:
    """Of a job that takes longer than it may run at once."""
    need = Needs(0, 4, server_bytes=0, worker_bytes=6.1e10, save_s=35.2, seconds=200_000)
    options = "--nodes 2 --ntasks-per-node 2 --cpus-per-task 8 --job-name long --max-time 10"
    words = ["my jobs/long.toml", "--mode", "sync", "--checkpoint-every", "300"]
    told = Path(__file__).with_name("long.sbatch").read_text()
    assert text_of(f"{options} --partition wide", need, words) == told
    need = Needs(1, 1, server_bytes=5e9, worker_bytes=4e9, save_s=2, seconds=1e6)
    given = ("mem-per-cpu 4G", "time 2-00:00:00", "account ml", "constraint avx512")
    text = text_of(" ".join(f"--{option}" for option in given), need, ["--lr", "0.1"])
    for line in (*given, "nodes 1", "cpus-per-task 1", "signal B:USR1@124"):
        assert f"\n#SBATCH --{line.replace(' ', '=')}\n" in text
    assert "\n# 1 server and 1 worker: about 4000 MB a worker, 5000 MB a server, and 11-" in text


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_text_for_others(scheduler: str, tmp_path: Path) -> None:
    """Of a job file; shellcheck has nothing to say."""
    options = f"{TWO_BY_TWO} --cpus-per-task 4 --partition wide --account ml"
    words = ["my jobs/a.toml", "--lr", "0.1"]
    text = text_of(f"--scheduler {scheduler} {options}", NEED, words)
    prefix, _, asked = HEADS[scheduler].partition(" ")
    head = "".join(f"#{prefix} {words}\n" for words in asked.split(", "))
    assert text.startswith(f"#!/bin/bash\n{head}")
    for line in (
        "# 1 server and 3 workers: about 390 MB a worker, 330 MB a server, and 00:02:07 to the end",
        f"export PATH={sys.prefix}/bin:$PATH ",
        "export OMP_NUM_THREADS=4 OPENBLAS_NUM_THREADS=4\n",
    ):
        assert f"\n{line}" in text
    assert " -- 'my jobs/a.toml' --lr 0.1 --out \"$run\" --resume auto &\n" in text
    if shutil.which("shellcheck"):
        (tmp_path / "job.sh").write_text(text)
        check = ["shellcheck", str(tmp_path / "job.sh")]
        done = subprocess.run(check, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_program() -> None:
    """Its time and memory are not known, and its folder is its own to name."""
    text = write(["--nodes", "2", "--job-name", "mine", "--", "python", "my model/train.py", "--x"])
    assert text.endswith("\nprepare\ntrain 'my model/train.py' --x\n")
    for line in ("time=24:00:00", "mem-per-cpu=2G", "job-name=mine", "signal=B:USR1@180"):
        assert f"\n#SBATCH --{line}\n" in text
    text = write(["--scheduler", "pbs", "--time", "30", "--", "-m", "my.training", "--x"])
    assert "\n#PBS -N my.training\n" in text
    assert " -- -m my.training --x &\n" in text
    assert "\n#PBS -l walltime=1800\n" in text


def test_times_as_sbatch_reads_and_writes_them() -> None:
    assert [clock(s) for s in (0, 59.2, 3600, 86399, 86400, 200_000)] == [
        *("00:00:00", "00:01:00", "01:00:00", "23:59:59", "1-00:00:00", "2-07:33:20")
    ]
    times = {"90": 5400, "2:30": 150, "1:00:30": 3630, "1-2": 93600, "1-2:30": 95400}
    assert {text: seconds(text) for text in times} == times
    assert seconds("1-0:0:9") == 86409


def test_of_a_job_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    given = "--qos long --gres=gpu:1 --mail-type END,FAIL --mail-user a@b.org"
    assert main([*["jobs/digits.toml", "--nodes", "2", "--lr", "0.01"], *given.split()]) == 0
    text = capsys.readouterr().out
    for line in ("job-name=digits", "nodes=2", "ntasks-per-node=4", "time=00:10:00", "qos=long",
                 "gres=gpu:1", "mail-type=END,FAIL", "mail-user=a@b.org"):  # fmt: skip
        assert f"#SBATCH --{line}\n" in text
    assert "# 2 servers and 6 workers: about" in text
    assert text.endswith("\ntrain jobs/digits.toml --lr 0.01\n")
    assert "\n#SBATCH --job-name=my-run-1\n" in write(["--job-name", "my run/1"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--servers 4", "servers=4 leaves no worker in a world of 4"),
        ("--nodes 0", "'0', expected an integer >= 1"),
        ("--lrr 1", "unknown option --lrr"),
        ("--dataset no.npz", "no.npz"),
        ("--time soon", "--time 'soon', expected minutes, hours:minutes:seconds or days-"),
        ("--time 3", "--time 3, expected more than 00:03:01; the ranks are asked to save"),
        ("--mem-per-cpu much", "--mem-per-cpu 'much', expected a size such as 500M or 4G"),
        ("--gres 'gpu 1'", "--gres 'gpu 1', expected a word"),
        ("--array 1-6", "--array 1-6, expected --sweep TABLE with it"),
        ("--row 2", "--row 2, expected --sweep TABLE with it"),
        ("--sweep no.txt", "--sweep no.txt: [Errno 2] No such file"),
        ("--scratch tmp", "--scratch tmp, expected an absolute path"),
        ("--copy other --lr 1", "--copy beside --lr, expected --copy DIR alone"),
        ("-- ls", "-- ls, expected program.py or -m MODULE behind --"),
        ("--lr 1 -- a.py", "--lr with a program, expected options of sbatch"),
        ("--sweep t -- a.py", "--sweep with a program"),
        ("--copy t -- a.py", "--copy with a program"),
        ("--scheduler lsf --gres gpu:1", "--gres with --scheduler lsf, expected SLURM"),
        (f"--scheduler pbs --sweep {ROOT}/slurm/sweep.txt", "--sweep with --scheduler pbs"),
        ("--scheduler nqs", "invalid choice: 'nqs'"),
    ],
)
def test_refused(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(words)) == 2
    caught = capsys.readouterr()
    assert (caught.out, caught.err[:7]) == ("", "mpips: ")
    assert message in caught.err


def test_time_limit_leaves_more_than_the_notice() -> None:
    """Of a job that takes minutes to save, whatever is asked for."""
    need = Needs(0, 4, server_bytes=0, worker_bytes=5e8, save_s=400, seconds=200)
    text = text_of("", need, [])
    assert "--signal=B:USR1@920\n" in text
    assert "--time=00:32:40\n" in text
    for more, save_s, least in (("--time 16", 400, "00:16:20"), ("--max-time 1", 2000, "01:09:40")):
        with pytest.raises(UserError, match=f"{more}, expected more than {least}"):
            text_of(more, dataclasses.replace(need, save_s=save_s), [])


def test_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data of the job are named where the nodes have them; what is built in stays."""
    monkeypatch.chdir(tmp_path)
    for name in ("x", "x-2", "y", "y-2"):
        np.save(tmp_path / f"{name}.npy", np.zeros((8, 2) if name[0] == "x" else 8, "f4"))
    options = ["--problem", "linear", "--test-fraction", "0.5", "--batch-size", "2"]
    text = write([*options, "--dataset", "x.npy,y.npy", "--scratch", "/scratch/ada/"])
    copied = f"{sys.prefix} " if sys.prefix != sys.base_prefix else ""
    assert f"\nscratch /scratch/ada {copied}{tmp_path}/x.npy {tmp_path}/y.npy\ntrain " in text
    there = f"/scratch/ada{tmp_path}"
    assert text.endswith(f" --dataset {there}/x.npy,{there}/y.npy\n")
    assert text.count("--test-dataset") == 0
    # A pattern is kept, and its files are copied.
    text = write([*options, "--dataset", "x*.npy,[y-z]*.npy", "--scratch", "/s"])
    files = " ".join(f"{tmp_path}/{name}.npy" for name in ("x-2", "x", "y-2", "y"))
    assert f"{files}\n" in text
    assert text.endswith(f" --dataset '/s{tmp_path}/x*.npy,/s{tmp_path}/[y-z]*.npy'\n")
    assert f"\nscratch /s {copied}".rstrip() + "\ntrain\n" in write(["--scratch", "/s"])


TABLE = """\ufeff# two words in quotes, and lines as Windows ends them
--lr 0.1 --seed 1

--lr 0.2 --out 'a b'
--lr 0.3"""


def test_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An array as long as its table; again for the rows that are not done."""
    table = tmp_path / "my table.txt"
    table.write_bytes(TABLE.replace("\n", "\r\n").encode())
    words = ["--sweep", str(table), "--epochs", "1"]
    text = write([*words, "--array=%2", "--job-name", "s"])
    assert "\n#SBATCH --array=1-3%2\n" in text
    assert "\n#SBATCH --output=%x-%A_%a.out\n" in text
    assert text.endswith(f"\nprepare\nsweep '{table}' --epochs 1\n")
    assert write([*words, "--row", "2"]) == "--lr 0.2 --out 'a b'\n"
    (tmp_path / "runs" / "2").mkdir(parents=True)
    (tmp_path / "runs" / "2" / "DONE").touch()
    again = [*words, "--out", str(tmp_path / "runs")]
    assert "\n#SBATCH --array=1,3\n" in write(again)
    assert "\n#SBATCH --array=2\n" in write([*again, "--array", "2"])
    for wrong, message in (
        ("--row 4", "row 4 of "),
        ("--array 2-4", "--array 2-4 of a table of 3 rows, expected 1 to 3"),
        ("--array two", "--array two, expected rows such as 1-6, 2,5 or 1-6%2"),
        ("--backup-workers 9", "row 1 of the table: "),
    ):
        assert main([*words, *wrong.split()]) == 2
        assert message in capsys.readouterr().err
    table.write_text("--lr 'open\n")
    assert main(words) == 2
    assert "my table.txt, line 1: no closing quotation" in capsys.readouterr().err


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
    """An epoch has as many batches in every mode, which workers share; steps are each one's own."""
    measured = Measured(parameters=1000, n_train=48_000, data_bytes=0, grad_s=0.01)
    config = Config(mode=mode, batch_size=10, **options)
    for ranks in (2, 9):
        found = needs(config, measured, 1, ranks)
        each_s = 48_000 / 10 / found.workers * SLACK * 0.01
        assert found.seconds - STARTUP_S == pytest.approx(config.epochs * each_s, rel=0.01)
        one = needs(dataclasses.replace(config, steps=1), measured, 1, ranks)
        assert one.seconds - STARTUP_S == pytest.approx(batches * SLACK * 0.01, rel=0.01)


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
@pytest.mark.parametrize("name", thinned(["async", "sync powersgd"], ()))
def test_memory_is_enough_and_not_much_more(name: str, tmp_path: Path) -> None:
    """Against the largest size that ranks of a job of 16 million parameters came to."""
    mode, codec = [*name.split(), "none"][:2]
    config = Config(mode=mode, codec=codec, hidden=(4000, 4000), steps=4, checkpoint_every="2steps")
    options = f"--mode {mode} --codec {codec} --hidden 4000,4000 --steps 4 --out run --quiet"
    options += " --checkpoint-every 2steps --node-size 1"
    train(3, *options.split(), cwd=tmp_path, timeout_s=200).check()
    found = summary(tmp_path / "run")
    need = needs(config, measure(config), 3, 1)
    assert (need.servers, need.workers) == (found["servers"], found["workers"])
    peaks = [mb * 2**20 for mb in found["peak_memory_mb"]]
    told = [need.server_bytes] * need.servers + [need.worker_bytes] * need.workers
    assert all(p <= t <= 2.5 * p for p, t in zip(peaks, told, strict=True)), (peaks, told)


def test_copies_the_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With all but this clone's site.sh; a script that is made there runs the copies."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main(["--copy", "slurm"]) == 0
    copies = {path.name: path for path in (tmp_path / "slurm").iterdir()}
    assert set(copies) == {p.name for p in (ROOT / "slurm").iterdir()} - {"site.sh"}
    for name, path in copies.items():
        assert path.read_bytes() == (ROOT / "slurm" / name).read_bytes()
    assert f"slurm/{name}\n" in capsys.readouterr().out
    assert f"\n. {tmp_path}/slurm/common.sh\n" in write([])
    copies["common.sh"].write_text("mine\n")
    assert main(["--copy", "slurm"]) == 2
    assert "slurm/common.sh, which differs, expected a folder" in capsys.readouterr().err
    assert copies["common.sh"].read_text() == "mine\n"
    assert main(["--copy", str(copies["common.sh"])]) == 2
    assert "File exists" in capsys.readouterr().err
