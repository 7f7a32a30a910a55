"""The library: a training loop of one's own on every worker, and servers that serve it.

    import mpips

    def train(worker: mpips.Worker) -> None:
        for batch in worker.batches((x, y), batch_size=64, epochs=5):
            params = worker.pull()
            loss = my_gradient(params, batch, out=worker.grads)
            worker.push(loss)

    result = mpips.run(train, params=init, optimizer=mpips.Adam(1e-3), mode="async")
    sys.exit(result.code)

The guide has it whole: ``python -m mpips guide library``. The names are in `mpips` itself, which
imports them, and starts MPI, when they are used.
"""
