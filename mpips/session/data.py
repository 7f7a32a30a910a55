"""Data of a run: counted once by workers, opened by each."""

from functools import partial
from pathlib import Path

from mpips import datasets
from mpips.checkpoint.run_folder import DATA, write_whole, writing_to
from mpips.datasets import Counted, DataInfo, Dataset, Entry, Files, index
from mpips.mpi.collective_errors import on_root, raise_on_all
from mpips.mpi.collectives import broadcast, gather_all
from mpips.mpi.world import Cluster
from mpips.session.folder import Run


def open_data(run: Run, ranks: Cluster) -> tuple[DataInfo, Dataset | None]:
    """Open the data on workers; the first worker examines the targets. Collective: yes.

    If a dataset has many files, the workers count them together, each a part. The result is saved
    in the run's folder. A resumed run compares the files with it.

    Returns:
        The description of the data on every rank, and the data on workers, else None.

    Raises:
        CollectiveError: As `mpips.datasets.open_dataset`; in a new run, if labels are invalid; in a
            resumed run, if its files have changed.
    """
    comm, config, first = ranks.comm, run.config, ranks.roles.workers[0]
    works = ranks.rank in ranks.roles.workers
    many = raise_on_all(comm, lambda: datasets.find_many(config) if ranks.rank == first else {})
    counted = _count(run, ranks, broadcast(comm, many, first))
    parts = raise_on_all(comm, lambda: datasets.open_parts(config, counted) if works else None)
    own = parts if ranks.rank == first else None
    strict = not (run.resumed or config.eval_only)
    known = raise_on_all(comm, lambda: datasets.describe(config, own, strict) if own else None)
    info: DataInfo = broadcast(comm, known, first)
    return info, raise_on_all(
        comm, lambda: datasets.make_dataset(config, parts, info) if parts else None
    )


def _count(run: Run, ranks: Cluster, many: dict[str, Files]) -> dict[str, Counted]:
    """Return counts and positions of the files of large datasets, from the index or counted now."""
    if not many:
        return {}
    comm, path = ranks.comm, run.out / DATA
    compared = run.resumed and not run.config.eval_only
    indexed = on_root(comm, lambda: index.load(path) if compared else {})
    workers = ranks.roles.workers
    n = len(workers)

    def count_files() -> index.Index:
        if ranks.rank not in workers:
            return {}
        mine = workers.index(ranks.rank)
        found = {k: _look(files, indexed.get(k, []), path, mine, n) for k, files in many.items()}
        if run.config.eval_only:
            return found
        save = partial(index.save_places, path, worker=mine)
        with writing_to(run.out):
            return {k: save(k, entries=e) for k, e in found.items()}

    gathered = gather_all(comm, raise_on_all(comm, count_files))
    found = {
        option: [gathered[workers[k % n]][option][k // n] for k in range(len(files.paths))]
        for option, files in many.items()
    }
    if not (run.config.eval_only or indexed.keys() >= many.keys()):
        on_root(comm, lambda: _save(path, found))
    return {
        option: Counted(files, found[option], partial(index.load_places, path, option))
        for option, files in many.items()
    }


def _look(files: Files, kept: list[Entry], path: Path, mine: int, workers: int) -> list[Entry]:
    """Return entries of a worker's files: every file whose number is `mine`, modulo `workers`."""
    if not kept:
        return [datasets.count_file(files, file) for file in files.paths[mine::workers]]
    index.check_names(kept, files, path)
    pairs = zip(kept[mine::workers], files.paths[mine::workers], strict=True)
    return [index.recognise(entry, file, path) for entry, file in pairs]


def _save(path: Path, found: index.Index) -> None:
    with writing_to(path.parent):
        write_whole(path, index.to_text(found))
