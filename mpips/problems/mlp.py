"""Multi-layer perceptrons, linear and softmax regression, and their losses."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mpips.config import Config
from mpips.datasets.base import Batch, DataInfo
from mpips.errors import UserError
from mpips.layout import Layout
from mpips.problems.base import Arrays, Problem


class Activation(NamedTuple):
    """An activation function f, its derivative, and the variance of initial weights.

    Attributes:
        apply: Replaces z by f(z), in place.
        slope: Replaces f(z) by f'(z), in place.
        variance: Returns the variance of a weight that keeps the signal's size, from the numbers of
            inputs and outputs.
    """

    apply: Callable[[np.ndarray], object]
    slope: Callable[[np.ndarray], object]
    variance: Callable[[int, int], float]


def glorot(inputs: int, outputs: int) -> float:
    """Return the variance of a weight by Glorot and Bengio, AISTATS 2010."""
    return 2 / (inputs + outputs)


ACTIVATIONS = {
    "relu": Activation(
        lambda z: np.maximum(z, 0, out=z),
        lambda h: np.greater(h, 0, out=h),
        lambda inputs, outputs: 2 / inputs,  # He et al., "Delving Deep into Rectifiers", ICCV 2015
    ),
    "tanh": Activation(
        lambda z: np.tanh(z, out=z),
        lambda h: np.subtract(1, np.multiply(h, h, out=h), out=h),
        glorot,
    ),
}


class Workspace:
    """Scratch arrays that are reused between calls, so a step allocates almost no memory.

    Each name has one array, of the largest size requested so far. A smaller request, such as that
    of the last batch, gets a part of it.
    """

    def __init__(self) -> None:
        self._flat: dict[str, np.ndarray] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array of undefined content; the next call with `name` may return it again."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.size < size or flat.dtype != dtype:
            flat = self._flat[name] = np.empty(size, dtype)
        return flat[:size].reshape(shape)


class MLP(Problem):
    """Multi-layer perceptron with `config.hidden` layers of `config.activation`.

    Equation, with h_0 = x and f the activation::

        h_k = f(h_{k-1} w_k + b_k)   for each hidden layer,    z = h_{K-1} w_K + b_K

    The loss on z is that of softmax regression if the dataset has class labels, and that of linear
    regression if not. Without hidden layers, the model is that regression.

    Parameters: ``w1`` (inputs, hidden[0]), ``b1`` (hidden[0],), ``w2``, and so on. Initial weights
    are normal, with He's variance for relu, and Glorot's for tanh and the last layer. Initial
    biases are zero.
    """

    def __init__(
        self, data: DataInfo, config: Config, hidden: tuple[int, ...] | None = None
    ) -> None:
        super().__init__(data, config)
        hidden = config.hidden if hidden is None else hidden
        outputs = math.prod(data.y_shape) if data.classes is None else data.classes
        widths = (math.prod(data.x_shape), *hidden, outputs)
        self._depth = len(widths) - 1
        shapes: dict[str, tuple[int, ...]] = {}
        for k in range(1, self._depth + 1):
            w, b = self._names(k)
            shapes |= {w: widths[k - 1 : k + 1], b: (widths[k],)}
        self.layout = Layout.of(shapes)
        self._activation = ACTIVATIONS[config.activation]
        self._loss = squared_error if data.classes is None else cross_entropy
        self._work = Workspace()

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return initial parameters from `rng`: weights normal, biases zero.

        They are drawn in float64 and rounded to `config.dtype`. So a seed gives the same parameters
        in both dtypes, but for rounding.
        """
        params = self.layout.views(np.zeros(self.layout.size, self.config.dtype))
        for k in range(1, self._depth + 1):
            w = params[f"w{k}"]
            variance = self._activation.variance if k < self._depth else glorot
            w[...] = rng.normal(0, math.sqrt(variance(*w.shape)), w.shape)
        return params

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        """Return the mean loss over the batch, and write its gradient to `out`."""
        with np.errstate(all="ignore"):
            h = self._forward(params, batch.x, self._work)
            loss = self._loss(h[-1], batch.y)
            self._backward(params, h, out)
        return loss

    def evaluate(self, params: Arrays, batch: Batch) -> dict[str, float]:
        """Return ``{"loss": mean loss}``, and ``"accuracy"`` if there are class labels."""
        with np.errstate(all="ignore"):
            z = self._forward(params, batch.x, Workspace())[-1]
            judged = {} if self.data.classes is None else {"accuracy": accuracy(z, batch.y)}
            return {"loss": self._loss(z, batch.y), **judged}

    def _names(self, layer: int) -> tuple[str, str]:
        """Return the names of a layer's weights and biases."""
        return f"w{layer}", f"b{layer}"

    def _forward(self, params: Arrays, x: np.ndarray, work: Workspace) -> list[np.ndarray]:
        """Return the values of all layers: the flat inputs first, the outputs z last."""
        h = [x.reshape(len(x), math.prod(x.shape[1:]))]  # there may be no samples
        for k in range(1, self._depth + 1):
            w, b = (params[name] for name in self._names(k))
            z = work.array(f"h{k}", (len(x), w.shape[1]), w.dtype)
            np.matmul(h[-1], w, out=z)
            z += b
            h.append(z)
            if k < self._depth:
                self._activation.apply(z)
        return h

    def _backward(self, params: Arrays, h: list[np.ndarray], out: Arrays) -> None:
        """Write the gradient to `out`.

        Args:
            params: The parameters.
            h: Values of all layers, with the gradient of the loss by z in place of z. Those of
                hidden layers are overwritten.
            out: Gets the gradient of each parameter.
        """
        delta = h[-1]
        for k in range(self._depth, 0, -1):
            w, b = self._names(k)
            np.matmul(h[k - 1].T, delta, out=out[w])
            np.sum(delta, axis=0, out=out[b])
            if k > 1:
                below = self._work.array(f"d{k - 1}", h[k - 1].shape, delta.dtype)
                np.matmul(delta, params[w].T, out=below)
                self._activation.slope(h[k - 1])
                below *= h[k - 1]
                delta = below


class OneLayer(MLP):
    """A perceptron without hidden layers: linear or softmax regression.

    Parameters: ``w`` (inputs, outputs) and ``b`` (outputs,). They start at zero, as the loss is
    convex.
    """

    def __init__(self, data: DataInfo, config: Config) -> None:
        super().__init__(data, config, hidden=())

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return zeros; `rng` is not used."""
        return self.layout.views(np.zeros(self.layout.size, self.config.dtype))

    def _names(self, layer: int) -> tuple[str, str]:
        return "w", "b"


class Linear(OneLayer):
    """Linear regression of real-valued targets, one or several columns, with squared loss.

    Equation, with r = x w + b - y, shape (n, outputs)::

        loss = 1/n sum_i 1/2 sum_j r_ij^2,   dloss/dw = x^T r / n,   dloss/db = 1^T r / n

    Raises:
        UserError: If the dataset has class labels.
    """

    def __init__(self, data: DataInfo, config: Config) -> None:
        if data.classes is not None:
            got = f"problem 'linear' with the {data.classes} class labels of dataset {data.name!r}"
            remedy = "use --problem softmax, or store the targets in floating point"
            raise UserError(got, "real-valued targets", remedy)
        super().__init__(data, config)


class Softmax(OneLayer):
    """Softmax regression (multinomial logistic regression) of class labels.

    Equation, with z = x w + b, p = softmax(z) and Y the labels as one-hot rows::

        loss = -1/n sum_i log p_{i, y_i},   dloss/dw = x^T (p - Y) / n,   dloss/db = 1^T (p - Y) / n

    Raises:
        UserError: If the dataset has no class labels.
    """

    def __init__(self, data: DataInfo, config: Config) -> None:
        if data.classes is None:
            remedy = "use --problem linear, or store the labels as integers from 0"
            if data.countable:
                remedy = f"they are whole numbers: give --classes {data.countable}"
            got = f"problem 'softmax' with the real-valued targets of dataset {data.name!r}"
            raise UserError(got, "class labels", remedy)
        super().__init__(data, config)


def squared_error(z: np.ndarray, y: np.ndarray) -> float:
    """Return the mean over rows of ``1/2 sum_j (z_ij - y_ij)^2``; `z` becomes its gradient.

    Args:
        z: Predictions, shape (n, k); overwritten with ``(z - y) / n``.
        y: Targets, n * k numbers in any shape that begins with n.
    """
    n = z.shape[0]
    z -= y.reshape(z.shape)
    # Summed in float64: the square of a float32 residual overflows long before the residual.
    total = np.einsum("ij,ij->", z, z, dtype=np.float64, casting="same_kind")
    z /= n
    return float(total) / (2 * n)


def cross_entropy(z: np.ndarray, y: np.ndarray) -> float:
    """Return the mean cross entropy of softmax(z) and labels; `z` becomes its gradient.

    The result is correct for logits of any magnitude: the largest of each row is subtracted first.

    Args:
        z: Logits, shape (n, classes); overwritten with ``(softmax(z) - onehot(y)) / n``.
        y: Labels, shape (n,), integers in [0, classes); the dataset's reader has checked them.
    """
    rows = np.arange(z.shape[0])
    z -= z.max(axis=1, keepdims=True)
    own = z[rows, y]
    np.exp(z, out=z)
    total = z.sum(axis=1, keepdims=True)
    losses = np.log(total[:, 0]) - own
    z /= total
    z[rows, y] -= 1
    z /= z.shape[0]
    return float(losses.mean(dtype=np.float64))


def accuracy(z: np.ndarray, y: np.ndarray) -> float:
    """Return the fraction of rows of `z` whose largest entry is at the label.

    Args:
        z: Logits, shape (n, classes). A row whose largest entry is NaN or infinite counts as wrong.
        y: Labels, shape (n,), integers.
    """
    best = z.argmax(axis=1)
    # A diverged model must not be right by chance; for argmax, NaN is the largest.
    defined = np.isfinite(z[np.arange(z.shape[0]), best])
    return float(np.mean((best == y) & defined))
