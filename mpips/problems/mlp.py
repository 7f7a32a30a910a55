"""Multi-layer perceptron of any depth, for classification or regression."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpips.errors import UserError, unknown
from mpips.layout import Layout
from mpips.problems.base import Arrays, Problem, Workspace, affine, affine_grad, flat_inputs
from mpips.problems.linear import squared_error
from mpips.problems.softmax import accuracy, cross_entropy

if TYPE_CHECKING:
    from mpips.config import Config
    from mpips.datasets.base import Batch, DataInfo


class Activation(NamedTuple):
    """An activation function f, and its derivative as a function of f's value.

    Attributes:
        apply: Replaces z by f(z), in place.
        slope: Replaces f(z) by f'(z), in place.
        variance: Variance of a weight that keeps the signal's size, of (inputs, outputs).
    """

    apply: Callable[[np.ndarray], object]
    slope: Callable[[np.ndarray], object]
    variance: Callable[[int, int], float]


def he(inputs: int, outputs: int) -> float:
    """Return the variance of He et al., "Delving Deep into Rectifiers", ICCV 2015."""
    return 2 / inputs


def glorot(inputs: int, outputs: int) -> float:
    """Return the variance of Glorot and Bengio, AISTATS 2010."""
    return 2 / (inputs + outputs)


def _relu(z: np.ndarray) -> None:
    np.maximum(z, 0, out=z)


def _relu_slope(h: np.ndarray) -> None:
    np.greater(h, 0, out=h)


def _tanh(z: np.ndarray) -> None:
    np.tanh(z, out=z)


def _tanh_slope(h: np.ndarray) -> None:
    np.multiply(h, h, out=h)
    np.subtract(1, h, out=h)


ACTIVATIONS = {
    "relu": Activation(_relu, _relu_slope, he),
    "tanh": Activation(_tanh, _tanh_slope, glorot),
}


class MLP(Problem):
    """Multi-layer perceptron with `config.hidden` layers of `config.activation`.

    Equation, with h_0 = x and f the activation::

        h_k = f(h_{k-1} w_k + b_k)   for each hidden layer,    z = h_{K-1} w_K + b_K

    and on z the loss of softmax regression if the dataset has class labels, that of linear
    regression if not. Without hidden layers it is just that model.

    Parameters: ``w1`` (inputs, hidden[0]), ``b1`` (hidden[0],), ``w2``, and so on. Weights are
    normal, of He's variance for relu and Glorot's for tanh and the last layer; biases are zero.

    Raises:
        UserError: If the activation is unknown, or a layer has no units.
    """

    def __init__(self, data: "DataInfo", config: "Config") -> None:
        super().__init__(data, config)
        if config.activation not in ACTIVATIONS:
            raise unknown("activation", config.activation, ACTIVATIONS)
        if any(width < 1 for width in config.hidden):
            got = ",".join(str(width) for width in config.hidden)
            raise UserError(f"hidden={got}", "at least 1 unit in each layer")
        outputs = math.prod(data.y_shape) if data.classes is None else data.classes
        widths = (math.prod(data.x_shape), *config.hidden, outputs)
        self._depth = len(widths) - 1
        shapes: dict[str, tuple[int, ...]] = {}
        for k in range(1, self._depth + 1):
            shapes |= {f"w{k}": widths[k - 1 : k + 1], f"b{k}": (widths[k],)}
        self.layout = Layout.of(shapes)
        self._activation = ACTIVATIONS[config.activation]
        self._loss = squared_error if data.classes is None else cross_entropy
        self._work = Workspace()

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return fresh parameters drawn from `rng`: weights normal, biases zero.

        They are drawn in float64 and rounded to `config.dtype`: one seed, one start, whatever
        the dtype.
        """
        params = self.layout.views(np.zeros(self.layout.size, self.config.dtype))
        for k in range(1, self._depth + 1):
            w = params[f"w{k}"]
            variance = self._activation.variance if k < self._depth else glorot
            w[...] = rng.normal(0, math.sqrt(variance(*w.shape)), w.shape)
        return params

    def loss_and_grad(self, params: Arrays, batch: "Batch", out: Arrays) -> float:
        """Return the mean loss over the batch, and write its gradient to `out`."""
        with np.errstate(all="ignore"):
            h = self._forward(params, batch.x, self._work)
            loss = self._loss(h[-1], batch.y)
            self._backward(params, h, out)
        return loss

    def evaluate(self, params: Arrays, batch: "Batch") -> dict[str, float]:
        """Return ``{"loss": mean loss}``, and ``"accuracy"`` if there are class labels."""
        with np.errstate(all="ignore"):
            z = self._forward(params, batch.x, Workspace())[-1]
            judged = {} if self.data.classes is None else {"accuracy": accuracy(z, batch.y)}
            return {"loss": self._loss(z, batch.y), **judged}

    def _forward(self, params: Arrays, x: np.ndarray, work: Workspace) -> list[np.ndarray]:
        """Return the values of all layers, the flat inputs first and the outputs z last."""
        h = [flat_inputs(x)]
        for k in range(1, self._depth + 1):
            w, b = params[f"w{k}"], params[f"b{k}"]
            z = work.array(f"h{k}", (x.shape[0], w.shape[1]), w.dtype)
            h.append(affine(h[-1], w, b, out=z))
            if k < self._depth:
                self._activation.apply(z)
        return h

    def _backward(self, params: Arrays, h: list[np.ndarray], out: Arrays) -> None:
        """Write the gradient to `out`; h[-1] holds the gradient by z, hidden layers are used up."""
        delta = h[-1]
        for k in range(self._depth, 0, -1):
            affine_grad(h[k - 1], delta, out[f"w{k}"], out[f"b{k}"])
            if k > 1:
                below = self._work.array(f"d{k - 1}", h[k - 1].shape, delta.dtype)
                np.matmul(delta, params[f"w{k}"].T, out=below)
                self._activation.slope(h[k - 1])
                below *= h[k - 1]
                delta = below
