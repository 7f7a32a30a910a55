"""What is installed: all that a clone has to offer, and found from any folder."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from launch import ROOT, python, run

from mpips import __version__

pytestmark = pytest.mark.long

TREE = (
    *("mpips", "jobs", "slurm", "setup.cfg", "pyproject.toml"),
    *("README.md", "CHANGELOG.md", "LICENSE"),
)
SHARE = Path(f"mpips-{__version__}.data", "data", "share", "mpips")  # in a wheel
BUILD = """
from setuptools import build_meta
build_meta.build_wheel("wheel")
build_meta.build_editable("editable")
"""


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a clone called mpips, and what it installs, as a wheel and editable."""
    folder = tmp_path_factory.mktemp("install")
    clone = folder / "mpips"
    clone.mkdir()
    for name in TREE:
        source, ignored = ROOT / name, shutil.ignore_patterns("__pycache__", "site.sh")
        if source.is_dir():
            shutil.copytree(source, clone / name, ignore=ignored)
        else:
            shutil.copy(source, clone / name)
    (clone / "slurm" / "site.sh").write_text("exit 1\n")
    python("-c", BUILD, cwd=clone)
    for kind in ("wheel", "editable"):
        (wheel,) = (clone / kind).glob("mpips-*.whl")
        zipfile.ZipFile(wheel).extractall(folder / kind)
    shutil.rmtree(clone / "build")
    return folder


def files(folder: Path, *suffixes: str) -> set[str]:
    found = (p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {str(p.relative_to(folder)) for p in found if not suffixes or p.suffix in suffixes}


def test_nothing_is_left_out(parent: Path) -> None:
    wheel = parent / "wheel"
    assert files(wheel / SHARE / "jobs") == files(ROOT / "jobs")
    assert files(wheel / SHARE / "slurm") == files(ROOT / "slurm") - {"site.sh"}
    kept = (".py", ".h5", ".npy", ".md", ".json", ".svg", ".toml", ".mplstyle")
    assert files(wheel / "mpips", *kept) == files(ROOT / "mpips", *kept)
    assert (wheel / "mpips" / "py.typed").is_file()
    assert (wheel / SHARE / "CHANGELOG.md").is_file()  # else pip leaves the folder behind
    kinds = {path.name.removeprefix(f"mpips-{__version__}") for path in wheel.iterdir()}
    assert kinds == {"mpips", ".dist-info", ".data"}
    (entries,) = wheel.glob("*/entry_points.txt")
    assert "mpips = mpips.__main__:script" in entries.read_text()


def test_it_works_without_the_clone(parent: Path, tmp_path: Path) -> None:
    """The README's way in another folder: copy jobs and scripts, make a script, train."""
    path = {"PYTHONPATH": str(parent / "wheel")}

    def mpips(*args: str) -> str:
        return python("-m", "mpips", *args, cwd=tmp_path, **path).stdout

    scripts = parent / "wheel" / SHARE / "slurm"
    assert f"\n. {scripts}/common.sh\n" in mpips("sbatch", "softmax-libsvm")
    assert len(mpips("jobs", "--copy", "jobs").splitlines()) == len(files(ROOT / "jobs"))
    mpips("sbatch", "--copy", "slurm")
    assert f"\n. {tmp_path}/slurm/common.sh\n" in mpips("sbatch", "jobs/hdf5.toml")
    words = ["-m", "mpips.train", "jobs/softmax-libsvm.toml", "--epochs", "1", "--out", "run"]
    run(2, words, tmp_path, env=path).check()
    assert (tmp_path / "run" / "DONE").exists()
    assert not list((parent / "wheel").rglob("site.sh"))


@pytest.mark.parametrize("kind", ["wheel", "editable"])
@pytest.mark.parametrize("folder", [".", "mpips"])
def test_a_clone_of_that_name_does_not_hide_it(kind: str, folder: str, parent: Path) -> None:
    """To Python, a folder mpips where one stands is a package too."""
    code = f"import site; site.addsitedir({str(parent / kind)!r}); import mpips"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"{code}; print(mpips.__file__)"],
        cwd=parent / folder, env=env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    installed = parent / ("wheel" if (kind, folder) == ("wheel", ".") else "mpips") / "mpips"
    assert done.stdout == f"{installed}/__init__.py\n", done.stderr
