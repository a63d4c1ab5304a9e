"""Learn for each weight whether it is rounded up or down.

Nagel et al., Up or Down? Adaptive Rounding for Post-Training Quantization (2020): a rectified sigmoid of a free
variable stands between the two integers, and a penalty drives it to one of them. For a linear layer the squared error
of the answers is tr(dWT G dW), with G the mean of x xT, so that one product gives the gradient over all samples.
"""

import numpy as np

from laconic.tensor import Array

STEPS = 250
"""With these settings half the error of the nearest rounding is left of MiniLM's layers in 4 bits; twice as many steps
take off no more than a thirtieth of it. The penalty is far greater than the paper's, the steps far fewer: its gradient
comes from a few samples at a time, this one from all."""
WARM = 0.2
"""Share of the steps without the penalty."""
RATE = 0.1
PENALTY = 2.0
SHARPNESS = (20.0, 2.0)
"""The penalty's exponent, at its first step and at the last."""
LOW, HIGH = -0.1, 1.1
"""The ends of the sigmoid, before it is cut at 0 and 1."""
MOMENTS = (0.9, 0.999)
"""Of Adam (Kingma and Ba, 2015)."""


def adaround(weight: Array, steps: Array, gram: Array, levels: tuple[int, int]) -> Array:
    """Integers [in, out], each next to the weight's place on the grid; zero for a weight that is zero.

    weight, steps: [in, out]. gram: the mean of x xT, [in, in].
    """
    exact = (weight / steps).astype(np.float32)
    floor = np.clip(np.floor(exact), *levels)
    importance = (gram / max(float(np.diagonal(gram).mean()), 1e-30)).astype(np.float32)
    size = steps / np.sqrt((steps**2).mean(axis=0))  # within a column, groups have steps of their own
    rest = np.clip(exact - floor, 0.001, 0.999)
    free = logit((rest - LOW) / (HIGH - LOW))
    first, second = np.zeros_like(free), np.zeros_like(free)
    for step in range(STEPS):
        sigmoid = 1 / (1 + np.exp(-free))
        wide = sigmoid * (HIGH - LOW) + LOW
        share = np.clip(wide, 0, 1)
        gradient = 2 * size * (importance @ (size * (floor + share - exact)))
        done = (step / STEPS - WARM) / (1 - WARM)
        if done >= 0:
            exponent = SHARPNESS[1] + (SHARPNESS[0] - SHARPNESS[1]) * (1 - done)
            distance = 2 * share - 1
            gradient -= PENALTY * 2 * exponent * np.sign(distance) * np.abs(distance) ** (exponent - 1)
        gradient *= np.where((wide > 0) & (wide < 1), sigmoid * (1 - sigmoid) * (HIGH - LOW), 0)
        first = MOMENTS[0] * first + (1 - MOMENTS[0]) * gradient
        second = MOMENTS[1] * second + (1 - MOMENTS[1]) * gradient**2
        scale = first / (1 - MOMENTS[0] ** (step + 1))
        free -= RATE * scale / (np.sqrt(second / (1 - MOMENTS[1] ** (step + 1))) + 1e-8)
    up = 1 / (1 + np.exp(-free)) * (HIGH - LOW) + LOW >= 0.5
    return np.where(weight == 0, 0, np.clip(floor + up, *levels))


def logit(share: Array) -> Array:
    """The inverse of the sigmoid."""
    return np.asarray(np.log(share / (1 - share)))
