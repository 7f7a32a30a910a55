"""Parameters in files of other programs: written from a checkpoint, and read as a start."""

import resource
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import committed, vector, written
from test_checkpoint import LAYOUT, save

from mpips.checkpoint import Checkpoint, TableRows, begin_step, write_rows
from mpips.checkpoint.__main__ import main
from mpips.checkpoint.exchange import ParameterFile
from mpips.checkpoint.files import is_parameter_file
from mpips.config import Config
from mpips.errors import UserError
from mpips.layout import Layout
from mpips.session.folder import Run
from mpips.session.setup import initial_of

SUFFIXES = pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
SMALL = Layout.of({"a.weight": (3, 2), "scale": (), "b": (4,)})


def small() -> dict[str, np.ndarray]:
    return {
        "a.weight": np.arange(6, dtype="f8").reshape(3, 2),
        "scale": np.array(7, "f4"),
        "b": np.arange(4, dtype="f2"),
    }


def write(path: Path, given: dict[str, Any]) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **given)
    else:
        pytest.importorskip("safetensors.numpy").save_file(given, path)
    return path


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    save(tmp_path / "run" / "checkpoints", 10)
    return tmp_path / "run"


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pt"])
def test_what_is_exported_is_read(run_directory: Path, tmp_path: Path, suffix: str) -> None:
    """Here and elsewhere, where names and shapes are as they were, and all that is in the file."""
    output, params = tmp_path / f"out{suffix}", vector(LAYOUT.size, 100)  # of step 10
    readers = {".pt": ("torch", "load"), ".safetensors": ("safetensors.numpy", "load_file")}
    if suffix in readers:
        package, name = readers[suffix]
        read = getattr(pytest.importorskip(package), name)
    assert main(["export", str(run_directory), "-o", str(output)]) == 0
    if suffix in readers:
        assert output.stat().st_size < 4 * LAYOUT.size + 4096
        found, arrays = read(output), LAYOUT.views(params)
        assert found.keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[name], array, strict=suffix != ".pt")
            assert found[name].shape == array.shape
    if suffix != ".pt":
        assert is_parameter_file(output)
        file, part = ParameterFile(output, LAYOUT, "f4"), np.zeros(LAYOUT.size - 20, "f4")
        assert file.notes == []
        assert file.read_params().tobytes() == params.tobytes()
        file.read_params(7, LAYOUT.size - 13, out=part)
        assert part.tobytes() == params[7:-13].tobytes()


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pt"])
def test_a_file_that_finds_no_room(run_directory: Path, suffix: str, capsys: Any) -> None:
    if suffix == ".pt":
        pytest.importorskip("torch")
    output, limit = run_directory / f"out{suffix}", resource.RLIMIT_FSIZE
    limits = resource.getrlimit(limit)
    try:
        resource.setrlimit(limit, (500, limits[1]))
        assert main(["export", str(run_directory), "-o", str(output)]) == 2
    finally:
        resource.setrlimit(limit, limits)
    assert f"cannot write {output}: " in capsys.readouterr().err
    assert [path.name for path in run_directory.iterdir()] == ["checkpoints"]


def test_a_missing_package_names_the_extra(
    run_directory: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    for module in ("torch", "safetensors"):
        monkeypatch.setitem(sys.modules, module, None)
    written, output = tmp_path / "out.safetensors", tmp_path / "out.pt"
    assert main(["export", str(run_directory), "-o", str(written)]) == 0, "it is only read by it"
    with pytest.raises(UserError, match=r"no safetensors, .*pip install 'mpips\[torch\]'"):
        ParameterFile(written, LAYOUT, "f4")
    assert main(["export", str(run_directory), "-o", str(output)]) == 2
    assert "pip install 'mpips[torch]'" in capsys.readouterr().err
    assert not output.exists()


def test_a_rank_looks_only_at_files_that_it_reads(run_directory: Path) -> None:
    """All files of a checkpoint for each of a thousand ranks are a million looks."""
    path = run_directory / "checkpoints" / "step-000000000010"
    read = Checkpoint.of(path).shards[0]
    for other in path.glob("shard-*.h5"):
        if other.name != "shard-0000.h5":
            other.unlink()
    saved = initial_of(Run(Config(), run_directory, path, True, []), LAYOUT)
    assert saved is not None
    np.testing.assert_array_equal(
        saved.read_params(0, read.end), vector(LAYOUT.size, 100)[: read.end]
    )
    with pytest.raises(UserError, match=r"shard-0001\.h5"):
        saved.read_params()


def test_a_file_has_no_average(tmp_path: Path) -> None:
    """It has one of the two, and does not say which: to evaluate the other is refused."""
    path = write(tmp_path / "in.npz", small())
    found = Run(Config(eval_only=True, init_from="in.npz", out="out"), tmp_path, path, False, [])
    assert isinstance(initial_of(found, SMALL), ParameterFile)
    found.config = replace(found.config, eval_ema=True)
    with pytest.raises(UserError, match=r"eval_ema with .*in\.npz, expected a run or a checkpoint"):
        initial_of(found, SMALL)


@SUFFIXES
def test_files_of_other_programs(tmp_path: Path, suffix: str) -> None:
    """In another order and other types, with arrays that the model has not."""
    names = [f"bn{k}.running_mean" for k in range(7)]
    more = {**dict.fromkeys(names, np.zeros(2, "f4")), "steps": np.array(3)}
    path = write(tmp_path / f"in{suffix}", {**more, **small()})
    file = ParameterFile(path, SMALL, "f4")
    np.testing.assert_array_equal(file.read_params(), [*range(6), 7, *range(4)])
    assert set(file.unused) == more.keys()
    assert file.notes[0].endswith(" and 3 more")


@SUFFIXES
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": None}, "without 'b', expected an array for each parameter of the model"),
        (
            {"a.weight": None, "a.weights": np.zeros(1)},
            r"without 'a.weight', .*; did you mean 'a.weights'\?",
        ),
        ({"a.weight": np.zeros((2, 3))}, r"'a.weight' of shape \(2, 3\), expected \(3, 2\), as in"),
        ({"scale": np.array(3)}, r"'scale' of type (int64|I64), expected float16, float32 or"),
        ({"b": np.array([0, np.nan, 0, 0])}, "NaN or infinity in 'b', expected finite"),
    ],
)
def test_what_does_not_fit(
    suffix: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    given = {name: array for name, array in {**small(), **change}.items() if array is not None}
    path = write(tmp_path / f"in{suffix}", given)
    with pytest.raises(UserError, match=message):
        ParameterFile(path, SMALL, "f4").read_params()


@SUFFIXES
def test_damaged_files(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"in{suffix}", small())
    whole = path.read_bytes()
    for content in (b"", b"nonsense", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"cannot read .*, expected a whole {suffix} file"):
            ParameterFile(path, SMALL, "f4")


class Runs:
    """Leaves a file where it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("was-run"),)


def test_what_is_no_file_of_parameters(tmp_path: Path, monkeypatch: Any) -> None:
    """Nothing in a file is run."""
    monkeypatch.chdir(tmp_path)
    objects = np.empty(4, object)
    objects[:] = Runs()
    path = write(tmp_path / "in.npz", {**small(), "b": objects, "c": objects})
    with pytest.raises(UserError, match=r"'b' of type object"):
        ParameterFile(path, SMALL, "f4")
    assert not (tmp_path / "was-run").exists()
    pickled = r"ends in \.npz or \.safetensors; save it by"
    wrong = dict.fromkeys(("in.pt", "in.pth", "in.bin"), pickled)
    for name, told in (wrong | {"absent.npz": r"no file .*absent\.npz, expected a file"}).items():
        with pytest.raises(UserError, match=told):
            is_parameter_file(tmp_path / name)
    (tmp_path / "run.npz").mkdir()
    assert not is_parameter_file(tmp_path / "run.npz")
    assert not is_parameter_file(tmp_path / "run")


def test_an_array_is_never_held_whole(tmp_path: Path) -> None:
    """Of a table of 40 MB and parameters of 24 a piece of 8 MB is in memory, or two."""
    rows, params = 300_000, np.arange(6_000_000, dtype="f4")
    table = TableRows(np.arange(rows), np.ones((rows, 16), "f4"), {"m": np.ones((rows, 16), "f4")})
    folder, layout = begin_step(tmp_path, 1), Layout.of({"w": (2000, 3000)})
    lists, told = [write_rows(folder, 0, 1, {"item": table})], {"item": {"rows": rows, "dim": 16}}
    shards = written(folder, 1, params, owners=1)
    committed(folder, 1, layout, shards, rows=lists, tables=told)
    sizes = {"all.npz": 64, "all.safetensors": 45, "item.npz": 40, "item.safetensors": 21}
    main(["inspect", str(folder)])  # what is imported late is

    def peak_of(*words: str) -> int:
        tracemalloc.start()
        try:
            assert main([words[0], str(folder), *words[1:]]) == 0
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    for name, megabytes in sizes.items():
        one = ["--table", "item"] * name.startswith("item")
        assert peak_of("export", *one, "-o", str(tmp_path / name)) < 18e6, name
        assert (tmp_path / name).stat().st_size > megabytes * 1e6
    assert peak_of("inspect") < 1e6, "row numbers are 2.4 MB"
    assert (ParameterFile(tmp_path / "all.safetensors", layout, "f4").read_params() == params).all()
    with np.load(tmp_path / "item.npz") as found:
        for column, array in table.arrays.items():
            np.testing.assert_array_equal(found[column], array, strict=True)
