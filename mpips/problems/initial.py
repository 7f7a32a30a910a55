"""Initial parameters of a problem, checked, as one flat vector."""

from collections.abc import Mapping

import numpy as np

from mpips.errors import UserError
from mpips.kernels.vectors import all_finite
from mpips.problems.base import Problem


def initial_vector(problem: Problem, seed: int, dtype: np.dtype) -> np.ndarray:
    """Return the problem's initial parameters as one flat vector, shape (size,).

    Raises:
        UserError: If the names or shapes are not those of the problem's layout.
    """
    vector = np.empty(problem.layout.size, dtype)
    views = problem.layout.views(vector)
    arrays = problem.init(np.random.default_rng(seed))
    expected = {name: view.shape for name, view in views.items()}
    found: object = type(arrays).__name__
    if isinstance(arrays, Mapping):
        found = {name: np.shape(array) for name, array in arrays.items()}
    if found != expected:
        raise UserError(f"init() of the problem gave {found}", f"{expected}, as in its layout")
    for name, view in views.items():
        view[...] = arrays[name]
        if not all_finite(view.reshape(-1)):
            got = f"init() of the problem gave NaN or infinity in {name}"
            raise UserError(got, "finite parameters")
    return vector
