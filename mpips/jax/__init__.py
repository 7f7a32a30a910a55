"""JAX models: `run` trains the parameters of a loss function.

    import mpips
    import mpips.jax as mj

    def loss(params, x, y):
        return ((x @ params["w"] + params["b"] - y) ** 2).mean()

    params = {"w": jnp.zeros(4), "b": jnp.zeros(())}
    result = mj.run(loss, params, (x, y), mpips.Adam(1e-3), mode="async", batch_size=64, epochs=5)
    result.params["w"]
    sys.exit(result.code)

The loss and its gradient are compiled once for each size of batch: a smaller last batch needs a
second compilation. Leaves of any floating type are trained as float32, or as float64 with
``jax_enable_x64``. The loss gets them in their own types.

On a CPU, XLA reads the parameters from the replica without a copy, if they begin at a multiple of
64 bytes. So leaves of a multiple of 16 elements come first, without gaps. Parameters change at the
next step, while XLA computes in its own threads: `value_and_grad` waits for the whole result. The
gradient is copied once, into the buffer that `step` pushes.

XLA has one thread for each core of this rank's share, if this module is imported before JAX is
used, and the variable ``NPROC`` is not set.

Environment:
    NPROC: Threads of XLA. Set to a rank's share of the cores, unless it is set.
"""

import os
from typing import TYPE_CHECKING

from mpips.errors import UserError
from mpips.library import import_name
from mpips.mpi.process import cores, local_ranks

try:
    import jax  # noqa: F401
except ImportError as problem:
    got = f"no JAX ({problem})"
    raise UserError(got, "jax >= 0.4.30", "pip install 'mpips[jax]'") from problem

if TYPE_CHECKING:
    from mpips.jax.optax_rules import rule_of as rule_of
    from mpips.jax.run import Result as Result
    from mpips.jax.run import run as run
    from mpips.jax.trees import arrays as arrays
    from mpips.jax.trees import evaluation as evaluation
    from mpips.jax.trees import tree as tree
    from mpips.jax.trees import value_and_grad as value_and_grad

_MODULES = {"Result": "run", "run": "run"}  # these start MPI
_MODULES["rule_of"] = "optax_rules"
_MODULES |= dict.fromkeys(("arrays", "evaluation", "tree", "value_and_grad"), "trees")
__all__ = ["Result", "arrays", "evaluation", "run", "tree", "value_and_grad"]

os.environ.setdefault("NPROC", str(max(1, cores() // local_ranks())))  # XLA's number of threads


def __getattr__(name: str) -> object:
    """Import a public name at its first use."""
    return import_name(__name__, _MODULES, name, globals())


def __dir__() -> list[str]:
    return [*globals(), *__all__]
