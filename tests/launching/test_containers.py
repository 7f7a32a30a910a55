"""Jobs in containers of Charliecloud, with the files of this host as an image."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from launch import ROOT, environment

from mpips.launch.mpirun import default_launcher, is_open_mpi

pytestmark = [pytest.mark.launch, pytest.mark.long]
COPIES = "MPIR_CVAR_CH4_CMA_ENABLE"
DENIED = f"{COPIES}=0 is set, as MPICH cannot copy between containers"


@pytest.fixture
def container(tmp_path: Path) -> list[str]:
    """A command that runs another one in a container: the image has links, and points to bind."""
    image, folders = tmp_path / "image", {"usr", "etc", "opt"}
    for path in (sys.prefix, sys.base_prefix, ROOT, tmp_path):
        folders.add(Path(path).resolve().parts[1])
    for name in folders | {"dev", "proc", "sys", "tmp", "home", "run", "var"}:
        (image / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (image / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group", "hosts", "resolv.conf"):  # ch-run binds files of its own there
        (image / "etc" / name).touch()
    binds = [word for name in folders - {"tmp"} for word in ("-b", f"/{name}:/{name}")]
    if shutil.which("ch-run") is None:
        pytest.skip("no ch-run: install charliecloud")
    tried = subprocess.run(["unshare", "--user", "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip("needs user namespaces")
    return ["ch-run", *binds, "-c", str(tmp_path), str(image), "--"]


def known() -> dict[str, str]:
    """Return the environment, with the user's name, which ch-run wants."""
    return {**environment(), "USER": os.environ.get("USER", "root")}


def run(words: Sequence[str], folder: Path, **more: str) -> str:
    """Run a command; returns what it has printed."""
    done = subprocess.run(
        words, cwd=folder, env={**known(), **more}, timeout=240, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode in (0, 3), done.stdout
    return done.stdout


def test_one_for_each_rank(container: list[str], tmp_path: Path) -> None:
    """MPICH is told not to copy, and the doctor says what is better."""
    start = [*default_launcher(), "-n", "2", *container, sys.executable, "-m"]
    told = run([*start, "mpips.train", "--epochs", "1"], tmp_path)
    assert "saved in runs/" in told
    assert (DENIED in told) is not is_open_mpi()
    assert "UCX  ERROR" not in told
    told = run([*start, "mpips", "doctor", "--limit", "100"], tmp_path)
    assert "2 ranks in 2 user namespaces, between which MPI cannot copy" in told


def test_one_that_ranks_join(container: list[str], tmp_path: Path) -> None:
    """MPICH copies if it is told to."""
    joined = [container[0], "--join", "--join-ct=2", *container[1:]]
    start = [*default_launcher(), "-n", "2", *joined, sys.executable, "-m"]
    told = run([*start, "mpips", "doctor", "--limit", "100"], tmp_path, **{COPIES: "1"})
    assert "one, so that MPI may copy from rank to rank" in told
    assert DENIED not in told
