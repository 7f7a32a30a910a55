"""TensorFlow's ParameterServerStrategy: push and pull of a vector or of rows, or an MLP trained.

The script is the coordinator, which schedules steps on idle workers. Servers and workers are child
processes, which never exit by themselves. They listen on all network interfaces, since TensorFlow
has no option to restrict this.
"""

import argparse
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from script import (  # type: ignore[import-not-found]
    ROW_DIM,
    Children,
    Send,
    add_mlp,
    add_size,
    make_parser,
    mlp_bytes,
    parse,
    positive,
    report,
    row_ids,
)

SAMPLES = 8192
RATE = 0.01
MIN_SHARD_BYTES = 256 << 10

Step = tuple[Callable[..., Any], tuple[Any, ...]]  # the scheduled function, and its arguments


# The cluster -----------------------------------------------------------------------------------


def free_ports(count: int) -> list[int]:
    """Return `count` unused ports of 127.0.0.1."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def make_cluster(workers: int, servers: int) -> dict[str, list[str]]:
    """Return the addresses of all tasks."""
    hosts = [f"127.0.0.1:{port}" for port in free_ports(workers + servers)]
    return {"worker": hosts[:workers], "ps": hosts[workers:]}


def serve(send: Send, cluster: dict[str, list[str]], task: str, index: int) -> None:
    """Run a server or a worker, without end."""
    import tensorflow as tf  # type: ignore[import-untyped]

    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=1, inter_op_parallelism_threads=4
    )
    names = {"job_name": task, "task_index": index, "protocol": "grpc"}
    server = tf.distribute.Server(cluster, **names, config=config, start=True)
    send(None)
    server.join()


def connect(cluster: dict[str, list[str]], shards: int) -> Any:
    """Return a strategy on the cluster, which divides variables into at most `shards` shards."""
    import tensorflow as tf

    spec = tf.train.ClusterSpec(cluster)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
    if shards == 1:
        return tf.distribute.ParameterServerStrategy(resolver)
    cut = tf.distribute.experimental.partitioners.MinSizePartitioner(MIN_SHARD_BYTES, shards)
    return tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=cut)


# The steps -------------------------------------------------------------------------------------


def make_push_pull(given: argparse.Namespace, strategy: Any, coordinator: Any) -> Step:
    """Return a step that reads all parameters, computes a gradient from them and subtracts it."""
    import tensorflow as tf

    with strategy.scope():
        shards = [tf.Variable(tf.zeros(given.size // given.servers)) for _ in range(given.servers)]

    @tf.function
    def step() -> None:
        def on_worker() -> None:
            for shard in shards:
                params = shard.read_value()
                shard.assign_sub(params * 1e-3 + 1e-3)

        strategy.run(on_worker)

    return step, ()


def make_rows(given: argparse.Namespace, strategy: Any, coordinator: Any) -> Step:
    """Return a step that reads rows of a table, and applies Adagrad to their gradients.

    A worker reads each row once, and sums the gradients of its ids. This sends less than
    `tf.gather` of all ids, and gives Adagrad one gradient per row.
    """
    import tensorflow as tf

    shape = (given.size // ROW_DIM, ROW_DIM)
    with strategy.scope():  # creates each variable on its server
        table = tf.Variable(lambda: tf.zeros(shape))
        total = tf.Variable(lambda: tf.zeros(shape))
    every = row_ids(given.measure, shape[0])

    @tf.function
    def step() -> None:
        def on_worker() -> None:
            lists = tf.constant(every)
            number = tf.random.uniform((), 0, len(every), tf.int32)
            ids, places = tf.unique(lists[number], tf.int32)
            read = tf.gather(tf.gather(table, ids), places)
            grads = tf.math.unsorted_segment_sum(read * 1e-3 + 1e-3, places, tf.size(ids))
            tf.raw_ops.ResourceSparseApplyAdagradV2(
                var=table.handle, accum=total.handle, lr=RATE, epsilon=1e-8, grad=grads, indices=ids
            )

        strategy.run(on_worker)

    return step, ()


def make_mlp(given: argparse.Namespace, strategy: Any, coordinator: Any) -> Step:
    """Return a training step of the MLP, which reads parameters once and updates them by SGD."""
    import numpy as np
    import tensorflow as tf

    random = np.random.RandomState(0)
    x = random.rand(SAMPLES, 784).astype("f4")
    y = random.randint(0, 10, SAMPLES)
    shapes = ((784, given.hidden), (given.hidden, given.hidden), (given.hidden, 10))
    with strategy.scope():
        weights = [
            tf.Variable((random.randn(*shape) / np.sqrt(shape[0])).astype("f4")) for shape in shapes
        ]
        biases = [tf.Variable(tf.zeros(shape[1])) for shape in shapes]
        count = tf.Variable(0, dtype=tf.int64)

    def data() -> Any:
        whole = tf.data.Dataset.from_tensor_slices((x, y))
        return whole.shuffle(1024).repeat().batch(given.batch).prefetch(2)

    def on_worker(images: Any, labels: Any) -> Any:
        loss, grads = loss_and_grad(weights, biases, images, labels)
        for variable, grad in zip((*weights, *biases), grads, strict=True):
            subtract(variable, RATE * grad)
        count.assign_add(1)
        return loss

    @tf.function
    def step(batches: Any) -> Any:
        return strategy.run(on_worker, args=next(batches))

    return step, (iter(coordinator.create_per_worker_dataset(data)),)


def loss_and_grad(weights: list[Any], biases: list[Any], images: Any, labels: Any) -> Any:
    """Return the mean loss of a batch, and its gradients by weights and biases."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        read = [tf.convert_to_tensor(weight) for weight in weights]
        tape.watch(read)
        hidden = tf.nn.relu(images @ read[0] + biases[0])
        hidden = tf.nn.relu(hidden @ read[1] + biases[1])
        logits = hidden @ read[2] + biases[2]
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        loss = tf.reduce_mean(losses)
    return loss, tape.gradient(loss, read + biases)


def subtract(variable: Any, value: Any) -> None:
    """Subtract a value from a variable, which may be divided into shards by rows."""
    begin = 0
    for shard in getattr(variable, "variables", (variable,)):
        rows = shard.shape[0]
        shard.assign_sub(value[begin : begin + rows])
        begin += rows


# The measurement -------------------------------------------------------------------------------

MAKE = {
    "push+pull": make_push_pull, "mlp": make_mlp, "zipf-rows": make_rows, "uniform-rows": make_rows,
}  # fmt: skip
INTER_OP_THREADS = {"mlp": 2}  # threads of the coordinator, by default 4


def time_steps(given: argparse.Namespace, coordinator: Any, step: Step) -> list[float]:
    """Return the seconds of each repeat, after one repeat to warm up."""
    function, args = step
    seconds = []
    for _ in range(given.repeats + 1):
        begin = time.perf_counter()
        for _ in range(given.workers * given.steps):
            coordinator.schedule(function, args=args)
        coordinator.join()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def coordinate(given: argparse.Namespace, cluster: dict[str, list[str]]) -> None:
    """Schedule the steps of the workers, and print the measurement."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(INTER_OP_THREADS.get(given.measure, 4))
    strategy = connect(cluster, given.servers if given.measure == "mlp" else 1)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    step = MAKE[given.measure](given, strategy, coordinator)
    seconds = time_steps(given, coordinator, step)
    size = mlp_bytes(given.hidden) if given.measure == "mlp" else 4 * given.size
    report("tensorflow-ps", tf.__version__, given, size, seconds)


def main() -> None:
    """Start servers and workers, and coordinate them."""
    parser = make_parser(__doc__, list(MAKE))
    add_size(parser)
    add_mlp(parser)
    parser.add_argument("--servers", type=positive, default=1, help="default: %(default)s")
    given = parse(parser)
    os.environ.update(CUDA_VISIBLE_DEVICES="-1", TF_CPP_MIN_LOG_LEVEL="3")
    os.environ.update(no_grpc_proxy="127.0.0.1")  # no proxy for connections on this host
    cluster = make_cluster(given.workers, given.servers)
    with Children() as children:
        for task in ("worker", "ps"):
            for index in range(len(cluster[task])):
                children.start(serve, cluster, task, index)
        children.results()
        coordinate(given, cluster)


if __name__ == "__main__":
    main()
