"""Catalogue of comparisons with peers and of guards against regressions."""

from functools import partial

from mpips.tools.bench.measure import Catalogue, Measure

_of = partial(Measure, package="benchmarks")

MEASURES = Catalogue(
    _of("row_workers"),
    _of("row_growth", named=True),
    _of("recording", (2,), least=2),
    _of("tracing", (2,), least=2),
    _of("idle", (3,), least=2),
    _of("streaming", (4,), least=2),
    _of("plan", (4,), least=3, named=True),
    _of("mlp"),
    _of("oversubscription"),
    _of("stragglers"),
    _of("evaluators"),
    _of("recovery", named=True),
    _of("supervision", named=True),
    _of("hosts", named=True),
    _of("convergence", named=True),
    _of("hybrid", named=True),
    _of("remote_hybrid", least=3, nodes=2, named=True),
    _of("start"),
    _of("reading"),
    _of("torch"),
    _of("spare_nodes", least=3, nodes=3),
    _of("gpu", named=True),
    _of("peers", named=True),
)
