"""FBGEMM's embedding tables on one core: pulls of rows, or applied gradients.

A forward pass reads the row of each id. A backward pass sorts the ids, sums the gradients of each
row, and applies Adagrad, element-wise or with one sum per row. Each is timed separately, in CPU
time of the process, so other load of the core is not counted. Rows are ordered by their ids,
without an index, as in mpips's table. All rows were written before. They lie in PyTorch's pages:
small ones, unless ``THP_MEM_ALLOC_ENABLE=1`` makes it request large ones.
"""

import argparse
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from script import (  # type: ignore[import-not-found]
    ONE_CORE,
    ROW_DIM,
    add_size,
    make_parser,
    parse,
    report,
    row_ids,
)

RATE, EPS, GRADIENT = 0.05, 1e-8, 1e-3
PACKAGE = "fbgemm_gpu-cpu"


def make_table(rows: int, row_wise: bool) -> Any:
    """Return a table of zeros in host memory, with its update rule."""
    from fbgemm_gpu.split_embedding_configs import (  # type: ignore[import-not-found]
        EmbOptimType,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (  # type: ignore[import-not-found]
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # type: ignore[import-not-found]
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    rule = EmbOptimType.EXACT_ROWWISE_ADAGRAD if row_wise else EmbOptimType.EXACT_ADAGRAD
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, ROW_DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=rule, learning_rate=RATE, eps=EPS, pooling_mode=PoolingMode.SUM,
    )  # fmt: skip


def make_step(given: argparse.Namespace) -> tuple[Callable[[Any], float], list[Any]]:
    """Return a function that makes a step and returns its seconds, and the ids of the steps."""
    import torch

    law, _, work = given.measure.partition("-")
    rows = given.size // ROW_DIM
    lists = [torch.from_numpy(ids.copy()) for ids in row_ids(f"{law}-rows", rows)]
    table, count = make_table(rows, work == "row-adagrad"), len(lists[0])
    bags, grads = torch.arange(count + 1), torch.full((count, ROW_DIM), GRADIENT)

    def pull(ids: Any) -> float:
        begin = time.process_time()
        with torch.no_grad():
            table(ids, bags)
        return time.process_time() - begin

    def push(ids: Any) -> float:
        found = table(ids, bags)
        begin = time.process_time()
        found.backward(grads)
        return time.process_time() - begin

    for begin in range(0, rows, count):  # allocates the pages of all rows
        push(torch.arange(begin, begin + count) % rows)
    return (pull if work == "pull" else push), lists


def main() -> None:
    """Make the steps, and print the measurement."""
    parser = make_parser(__doc__, ONE_CORE)
    add_size(parser)
    given = parse(parser)
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    import torch

    torch.set_num_threads(1)
    given.workers = 1
    step, lists = make_step(given)
    seconds = [
        sum(step(lists[k % len(lists)]) for k in range(given.steps))
        for _ in range(given.repeats + 1)
    ][1:]
    report("fbgemm", version(PACKAGE), given, 4 * given.size, seconds)


if __name__ == "__main__":
    main()
