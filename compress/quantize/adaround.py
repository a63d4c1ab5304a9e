"""AdaRound: learn for each weight whether it is rounded up or down.

Nagel et al., Up or Down? Adaptive Rounding for Post-Training Quantization (2020): a rectified sigmoid of a free
variable interpolates between the two integers, and a penalty drives it to one of them. For a linear layer the squared
error of the output is tr(dWT G dW), with G the mean of x xT, so that one product gives the gradient over all samples.
"""

import numpy as np

from laconic.arrays import Array

ITERATIONS = 250
"""Of Adam. For MiniLM's layers in 4 bits this halves the error of rounding to nearest; twice as many iterations remove
at most another thirtieth. The penalty is far larger than the paper's and the iterations far fewer, as each gradient is
over all samples, and not over a few."""
WARMUP_SHARE = 0.2
"""Share of the iterations without the penalty."""
LEARNING_RATE = 0.1
PENALTY = 2.0
EXPONENTS = (20.0, 2.0)
"""The penalty's exponent at its first and its last iteration."""
STRETCH_LOW, STRETCH_HIGH = -0.1, 1.1
"""The range of the stretched sigmoid, before it is clipped to 0 and 1."""
ADAM_BETAS = (0.9, 0.999)
"""Decay rates of Adam (Kingma and Ba, 2015)."""


def adaround(weight: Array, scales: Array, gram: Array, levels: tuple[int, int]) -> Array:
    """Round a weight to one of the two neighbouring integers each; a weight of zero stays zero.

    weight, scales: [in, out] float32. gram: the mean of x xT, [in, in]. levels: lowest and highest integer. Returns
    integers [in, out].
    """
    exact = (weight / scales).astype(np.float32)
    floor = np.clip(np.floor(exact), *levels)
    importance = (gram / max(float(np.diagonal(gram).mean()), 1e-30)).astype(np.float32)
    size = scales / np.sqrt((scales**2).mean(axis=0))  # within a column, each group has a scale of its own
    rest = np.clip(exact - floor, 0.001, 0.999)
    free = logit((rest - STRETCH_LOW) / (STRETCH_HIGH - STRETCH_LOW))
    first, second = np.zeros_like(free), np.zeros_like(free)
    for step in range(ITERATIONS):
        sigmoid = 1 / (1 + np.exp(-free))
        wide = sigmoid * (STRETCH_HIGH - STRETCH_LOW) + STRETCH_LOW
        share = np.clip(wide, 0, 1)
        gradient = 2 * size * (importance @ (size * (floor + share - exact)))
        done = (step / ITERATIONS - WARMUP_SHARE) / (1 - WARMUP_SHARE)
        if done >= 0:
            exponent = EXPONENTS[1] + (EXPONENTS[0] - EXPONENTS[1]) * (1 - done)
            distance = 2 * share - 1
            gradient -= PENALTY * 2 * exponent * np.sign(distance) * np.abs(distance) ** (exponent - 1)
        gradient *= np.where((wide > 0) & (wide < 1), sigmoid * (1 - sigmoid) * (STRETCH_HIGH - STRETCH_LOW), 0)
        first = ADAM_BETAS[0] * first + (1 - ADAM_BETAS[0]) * gradient
        second = ADAM_BETAS[1] * second + (1 - ADAM_BETAS[1]) * gradient**2
        scale = first / (1 - ADAM_BETAS[0] ** (step + 1))
        free -= LEARNING_RATE * scale / (np.sqrt(second / (1 - ADAM_BETAS[1] ** (step + 1))) + 1e-8)
    up = 1 / (1 + np.exp(-free)) * (STRETCH_HIGH - STRETCH_LOW) + STRETCH_LOW >= 0.5
    return np.where(weight == 0, 0, np.clip(floor + up, *levels))


def logit(share: Array) -> Array:
    """The inverse of the sigmoid."""
    return np.asarray(np.log(share / (1 - share)))
