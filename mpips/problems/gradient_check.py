"""Check of a problem's gradient against differences of its loss.

Let g be the gradient of the loss f at w. For a direction d within one array, the check compares
``g . d`` with the difference ``(f(w + h d) - f(w - h d)) / 2 h`` for a small h. The directions are
that of g, random ones, and single elements: those of the largest gradients, and random ones.

Rounding disturbs the difference if h is small, and curvature if h is large. A kink, such as relu's,
disturbs it if h reaches the kink. So the check tries several h. A direction is wrong only if the
differences of two neighbouring h agree with each other, but not with g. An array with a wrong
direction is checked again at another w, as the first w may be on a kink.

The loss may be rough, such as one computed in float32. Third differences measure its noise, as in
More and Wild, "Estimating computational noise", SIAM J. Sci. Comput. 33 (2011).
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mpips.config import Config
from mpips.datasets import Batch, open_dataset
from mpips.datasets.loader import Loader
from mpips.datasets.order import Order
from mpips.errors import UserError, human_bytes
from mpips.problems import Problem, load_problem
from mpips.problems.base import statistics
from mpips.problems.evaluation import checked_loss
from mpips.problems.rows import without_tables

STEPS = ((1e-5, 1e-4), (1e-6, 1e-5), (1e-4, 1e-3), (1e-3, 1e-2))  # h over an array's RMS
TOLERANCE = 1e-4
DOUBTS = 10  # an error must exceed the uncertainty so many times
LARGEST, RANDOM, DIRECTIONS = 12, 24, 4
SHIFT = 0.01  # random shift of the initial parameters: zeros would hide mistakes, and be on kinks
CLEAR, NEGLIGIBLE = 0.1, 1e-6  # uncertainty over the larger of two numbers, or over the loss
POINTS, SPACING = 14, 3e-7
NOISE = 20 * np.finfo("f8").eps
VECTORS = 6  # vectors of all parameters in memory at a time


@dataclass(frozen=True)
class Probe:
    """Result of the check along one direction of an array.

    Attributes:
        place: The direction, in words.
        given: Derivative by the problem's gradient, ``g . d``.
        found: Derivative by differences of the loss.
        doubt: Uncertainty of `found`.
        negligible: Largest uncertainty that does not matter.
    """

    place: str
    given: float
    found: float
    doubt: float
    negligible: float

    @property
    def error(self) -> float:
        """Difference of the two derivatives, relative to the larger one."""
        return abs(self.given - self.found) / max(abs(self.given), abs(self.found), 1e-300)

    @property
    def right(self) -> bool:
        """Whether the two derivatives agree within the uncertainty, and that is small."""
        clear = self.doubt <= max(CLEAR * self._size, self.negligible)
        return clear and abs(self.given - self.found) <= TOLERANCE * self._size + self.doubt

    @property
    def wrong(self) -> bool:
        """Whether the two derivatives differ by far more than the uncertainty."""
        return abs(self.given - self.found) > 10 * TOLERANCE * self._size + DOUBTS * self.doubt

    @property
    def _size(self) -> float:
        return max(abs(self.given), abs(self.found))


class Checker:
    """Checks the gradient of a problem on one batch, in float64.

    Args:
        problem: The problem, made for float64.
        batch: The batch, in float64.
        seed: Seed of the parameters and of the directions.

    Raises:
        UserError: If the loss or the gradient is not finite, or a second call of ``loss_and_grad``
            returns another loss.
    """

    def __init__(self, problem: Problem, batch: Batch, seed: int) -> None:
        self._problem, self._batch, self._rng = problem, batch, np.random.default_rng([seed, 1])
        layout = problem.layout
        self._flat, self._grad, self._gradient = np.zeros((3, layout.size))
        self._params, self._gradients = layout.views(self._flat), layout.views(self._gradient)
        self._given, self._out = layout.views(self._flat, writable=False), layout.views(self._grad)
        self._start = problem.init(np.random.default_rng(seed))
        self._move()

    def _move(self) -> None:
        """Draw other parameters near the initial ones, and compute the gradient there."""
        for name, view in self._params.items():
            start = np.asarray(self._start[name], "f8")
            size = np.sqrt(np.mean(start**2)) or 1.0
            view[...] = start + SHIFT * size * self._rng.standard_normal(view.shape)
        loss = self._loss()
        self._gradient[:] = self._grad
        self._negligible = NEGLIGIBLE * max(1.0, abs(loss))
        again = self._loss()
        if not np.isfinite(loss) or loss != again:
            expected = "a finite loss that depends on nothing but parameters and batch"
            remedy = "turn off randomness, such as dropout, for the check"
            raise UserError(f"a loss of {loss}, then of {again}", expected, remedy)
        for name, view in self._gradients.items():
            if not np.isfinite(view).all():
                got = f"loss_and_grad of the problem left NaN or infinity in out[{name!r}]"
                raise UserError(got, "the mean gradient in every element")
        self._noise = max(NOISE * max(1.0, abs(loss)), 3 * self._roughness())

    def _roughness(self) -> float:
        """Return the noise of the loss over very small steps."""
        here, along = self._flat.copy(), self._rng.standard_normal(self._flat.size)
        for name, view in self._problem.layout.views(along).items():
            view *= np.sqrt(np.mean(self._params[name] ** 2))
        losses = []
        for k in range(POINTS):
            self._flat[:] = here + k * SPACING * along
            losses.append(self._loss())
        self._flat[:] = here
        return float(np.median(np.abs(np.diff(losses, 3))) / np.sqrt(20))

    def _loss(self) -> float:
        self._grad[:] = np.nan
        with np.errstate(all="ignore"):
            return checked_loss(self._problem.loss_and_grad(self._given, self._batch, self._out))

    def check(self, name: str) -> list[Probe]:
        """Check all directions of an array; if one is wrong, check again at other parameters.

        Returns:
            The probes; with a wrong one only if both checks have one.
        """
        probes = [self._probe(name, *each) for each in self._directions(name)]
        if any(probe.wrong for probe in probes):
            self._move()
            again = [self._probe(name, *each) for each in self._directions(name)]
            if not any(probe.wrong for probe in again):
                return again
        return probes

    def _directions(self, name: str) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Yield directions of an array: description, indices of elements, and their weights."""
        shape, grad = self._gradients[name].shape, self._gradients[name].reshape(-1)
        everything = np.arange(grad.size)
        if norm := np.linalg.norm(grad):
            yield "along it", everything, grad / norm
        for _ in range(DIRECTIONS if grad.size > 1 else 0):
            weights = self._rng.standard_normal(grad.size)
            yield "in a random direction", everything, weights / np.linalg.norm(weights)
        large = np.argsort(-np.abs(grad), kind="stable")[:LARGEST]
        drawn = self._rng.choice(grad.size, min(RANDOM, grad.size), replace=False)
        for k in dict.fromkeys([*large.tolist(), *drawn.tolist()]):
            place = ", ".join(str(i) for i in np.unravel_index(k, shape))
            yield f"at [{place}]", np.array([k]), np.ones(1)

    def _probe(self, name: str, place: str, which: np.ndarray, weights: np.ndarray) -> Probe:
        grad, params = self._gradients[name].reshape(-1), self._params[name].reshape(-1)
        given, size = float(grad[which] @ weights), float(np.sqrt(np.mean(params**2))) or 1.0
        best: Probe | None = None
        for small, large in STEPS:
            steps = np.array([small, large]) * size
            finer, coarser = (self._difference(params, which, h * weights, h) for h in steps)
            doubt = abs(finer - coarser) + self._noise / steps[0]
            probe = Probe(place, given, finer, doubt, self._negligible)
            if probe.right:
                return probe
            if best is None or doubt < best.doubt:
                best = probe
        assert best is not None, "STEPS is not empty"
        return best

    def _difference(
        self, params: np.ndarray, which: np.ndarray, by: np.ndarray, step: float
    ) -> float:
        before = params[which]
        params[which] = before + by
        above = self._loss()
        params[which] = before - by
        below = self._loss()
        params[which] = before
        return (above - below) / (2 * step)


def first_batch(config: Config) -> tuple[Problem, Batch]:
    """Return the problem and the first batch of a job, with rows of tables as parameters.

    Raises:
        UserError: As `open_dataset` and `load_problem`.
    """
    dataset = open_dataset(config)
    problem, source = load_problem(config.problem, dataset.info, config), dataset.train
    block = source.block(config.batch_size)
    order = Order(source.n, block, config.seed, shuffle=config.shuffle)
    with Loader(source, order, np.dtype(config.dtype)) as loader:
        loader.submit(0, 0, min(config.batch_size, source.n))
        batch = loader.take()
    return without_tables(problem, [batch], config.dtype), batch


def check_gradient(config: Config, memory_bytes: int) -> tuple[str, UserError | None]:
    """Check the gradient of a job's problem.

    Args:
        config: The job.
        memory_bytes: Memory that the check may take.

    Returns:
        A table of the arrays as text, and an error if the gradient of one of them is wrong.

    Raises:
        UserError: If the gradient cannot be checked.
    """
    from threadpoolctl import threadpool_limits

    config = dataclasses.replace(config, dtype="float64")
    problem, batch = first_batch(config)
    check_memory(problem.layout.size, memory_bytes)
    with threadpool_limits(config.threads or 1):  # many gradients, each of one batch
        return _check(config, problem, batch)


def check_memory(size: int, there: int) -> None:
    """Check that there is memory for a check of `size` parameters.

    Raises:
        UserError: If there is less.
    """
    needed = VECTORS * size * np.dtype("f8").itemsize
    if needed > there:
        got = f"a check of {size:,} parameters, which takes {human_bytes(needed)}"
        remedy = "check a smaller model of the same layers"
        expected = f"at most {human_bytes(there)}, the memory of the host or control group"
        raise UserError(got, expected, remedy)


def _check(config: Config, problem: Problem, batch: Batch) -> tuple[str, UserError | None]:
    checker = Checker(problem, batch, config.seed)
    lines = [
        f"gradient of {config.problem} on the first {len(batch)} samples, in float64",
        f"{'array':12s}  {'directions':>10s}  {'right':>6s}  {'wrong':>6s}  {'unclear':>7s}  error",
    ]
    error: UserError | None = None
    rough = []
    for name in [name for name in problem.layout.names if name not in statistics(problem)]:
        probes = checker.check(name)
        wrong = [probe for probe in probes if probe.wrong]
        right = [probe for probe in probes if probe.right]
        worst = max(wrong or right or probes, key=lambda probe: probe.error)
        unclear = len(probes) - len(right) - len(wrong)
        lines.append(
            f"{name[:12]:12s}  {len(probes):10d}  {len(right):6d}  {len(wrong):6d}  {unclear:7d}  "
            f"{worst.error:.1e}"
        )
        if wrong and error is None:
            error = _error(name, wrong[0])
        if not (right or wrong):
            rough.append(name)
    if rough:
        lines.append(f"nothing can be said of {', '.join(rough)}: the loss is too rough there")
    elif error is None:
        lines.append("the gradient is right")
    return "\n".join(lines) + "\n", error


def _error(name: str, probe: Probe) -> UserError:
    got = f"loss_and_grad of the problem: gradient {probe.given:.6g} in out[{name!r}] {probe.place}"
    both = probe.given and probe.found
    hint = f"it is {probe.given / probe.found:.4g} times that" if both else ""
    return UserError(got, f"{probe.found:.6g}, as the loss changes there", hint)
