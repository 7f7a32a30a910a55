"""One run from its command line to its summary.

Fields of summary.json:
    global_step, epochs, samples: Updates applied, passes over the data, and samples, resumed jobs
        included.
    steps: Steps of each worker, in the same way.
    stop_reason: ``epochs``, ``steps``, ``target``, ``patience``, ``diverged``, ``stopped`` (by
        ``worker.stop``), or the name of a signal.
    loss, eval_loss, accuracy: The last training loss, and the results on the held-out samples. Null
        where there are none.
    best_step, best_loss: The evaluation with the lowest held-out loss, with ``--evaluators``.
    unsaved: Why the last state is in no checkpoint, or null.
    warnings: Texts of the warnings.
    resumed_from: Path of the checkpoint that the job continued, or null.
    mode, optimizer, lr, seed, codec, pull_codec, inject_delay: Options, as the job used them;
        ``inject_delay`` is a factor by worker.
    command: The command line.
    parameters: Number of parameters, without tables.
    world, servers, workers, evaluators: Numbers of ranks: all, and those of each role.
    nodes.host, nodes.ranks: Each node: its host and its ranks.
    mpi, version: The MPI library, and the version of mpips.
    wall_s, train_s: Seconds of this job, and of its training alone. All fields below are of this
        job, too.
    samples_per_s: Samples over ``train_s``.
    pushes_sent, pushes_applied: Pushes of all workers, and of the server that applied the most.
    staleness.mean, staleness.p50, staleness.p99, staleness.max: Staleness of the updates: mean,
        median, 99th percentile and largest, in updates.
    staleness.histogram: Updates by their staleness: 0, 1, ...; the last number counts all above.
    clock_distance_max: Largest distance of a read in clocks, in mode ``ssp``, else null.
    torn_reads: Pulls that read a part of an update.
    bytes_pushed, bytes_pulled: Bytes of whole gradients and replicas, within nodes too.
    bytes_sent, bytes_received: Bytes that crossed nodes, packed and with headers: of workers, in
        rounds of the nodes' sums and results.
    hashed.ids, hashed.shared: Columns of categories: ids read, and ids that several values share.
        ``hashed`` is null if there are no such columns.
    tables.rows, tables.dim: Each table: its shape.
    tables.changed: Rows that were ever changed.
    tables.pulled, tables.pushed: Ids of rows that were read, and of rows with a gradient.
    tables.again, tables.torn: Reads of a row that met an update and were repeated, and rows that
        were taken torn after many of these.
    tables.ahead: Ids of rows that were asked for before they were pulled.
    tables.hot.row, tables.hot.share: The rows that are pushed most, each with its share of the ids.
        One of 509 ids is counted.
    tables.hashed.ids, tables.hashed.shared, tables.hashed.of: A table of hashed ids: rows
        with ids, rows that several ids share, and how many rows were examined. Null for other
        tables.
    tables.evicted: Rows evicted by age; null without ``evict_after``.
    per_worker.rank, per_worker.steps, per_worker.samples: Each worker: its rank and its work.
    per_worker.compute_s, per_worker.pull_s, per_worker.push_s, per_worker.wait_s: Its time.
    per_worker.bytes_sent, per_worker.bytes_received: Its bytes to and from other nodes.
    per_server.rank, per_server.bytes: Each server, in rounds each owner: its rank, and the bytes
        that it owns.
    per_server.applied, per_server.pushes_dropped: Pushes that it applied and dropped.
    per_server.busy_s, per_server.staleness_mean: Its busy time, and the mean of its staleness.
    per_server.rows_changed, per_server.rows_pushed, per_server.rows_pulled: Its rows by table.
    per_server.taken_over_by, per_server.taken_over_in_s, per_server.statistics_from: A server that
        died: the server that took its shard over, in how many seconds, and the update from which
        its figures count.
    per_worker.lost, per_server.lost: True if it died. Of such a worker only the steps are known.
    lost: Ranks that died while the run continued.
    peak_memory_mb: Of each rank, with shared memory; null if it died.
"""
