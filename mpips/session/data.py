"""Data of a run: found once, counted by workers, opened everywhere."""

from functools import partial
from pathlib import Path

from mpips import datasets
from mpips.checkpoint.run_folder import DATA, writing_to
from mpips.datasets import Counted, DataInfo, Dataset, Entry, Files, index
from mpips.mpi.collective_errors import on_root, raise_on_all
from mpips.mpi.collectives import broadcast, gather_all
from mpips.mpi.world import Cluster
from mpips.session.folder import Run


def open_data(run: Run, ranks: Cluster) -> tuple[DataInfo, Dataset | None]:
    """Open the data on workers; one of them looks at the targets for all. Collective: yes.

    Files of a dataset of many are counted by the workers together, each a part of them. What they
    found is kept in the run's folder; a run that is resumed compares the files with that.

    Returns:
        What the data is, on every rank, and the data itself, on workers.

    Raises:
        CollectiveError: As `mpips.datasets.open_dataset`; for odd labels in a run that begins
            alone. If a run is resumed, and its files are others.
    """
    comm, config, first = ranks.comm, run.config, ranks.roles.workers[0]
    works = ranks.rank in ranks.roles.workers
    many = raise_on_all(comm, lambda: datasets.find_many(config) if ranks.rank == first else {})
    counted = _count(run, ranks, broadcast(comm, many, first))
    parts = raise_on_all(comm, lambda: datasets.open_parts(config, counted) if works else None)
    looks = parts if ranks.rank == first else None
    strict = not (run.resumed or config.eval_only)
    found = raise_on_all(comm, lambda: datasets.describe(config, looks, strict) if looks else None)
    info: DataInfo = broadcast(comm, found, first)
    return info, raise_on_all(
        comm, lambda: datasets.make_dataset(config, parts, info) if parts else None
    )


def _count(run: Run, ranks: Cluster, many: dict[str, Files]) -> dict[str, Counted]:
    """Return what is known of the files of datasets of many, from the index or counted now."""
    if not many:
        return {}
    comm, path = ranks.comm, run.out / DATA
    compared = run.resumed and not run.config.eval_only
    kept = on_root(comm, lambda: index.load(path) if compared else {})
    workers = ranks.roles.workers
    n = len(workers)

    def look() -> index.Index:
        if ranks.rank not in workers:
            return {}
        mine = workers.index(ranks.rank)
        found = {k: _look(files, kept.get(k, []), path, mine, n) for k, files in many.items()}
        if run.config.eval_only:
            return found
        save = partial(index.save_places, path, worker=mine)
        with writing_to(run.out):
            return {k: save(k, entries=e) for k, e in found.items()}

    looked = gather_all(comm, raise_on_all(comm, look))
    found = {
        option: [looked[workers[k % n]][option][k // n] for k in range(len(files.paths))]
        for option, files in many.items()
    }
    if not (run.config.eval_only or kept.keys() >= many.keys()):
        on_root(comm, lambda: _save(path, found))
    return {
        option: Counted(files, found[option], partial(index.load_places, path, option))
        for option, files in many.items()
    }


def _look(files: Files, kept: list[Entry], path: Path, mine: int, workers: int) -> list[Entry]:
    """Look at a worker's part of the files: every file whose number is `mine`, modulo `workers`."""
    if not kept:
        return [datasets.count_file(files, file) for file in files.paths[mine::workers]]
    index.check_names(kept, files, path)
    pairs = zip(kept[mine::workers], files.paths[mine::workers], strict=True)
    return [index.recognise(entry, file, path) for entry, file in pairs]


def _save(path: Path, found: index.Index) -> None:
    with writing_to(path.parent):
        index.save(path, found)
