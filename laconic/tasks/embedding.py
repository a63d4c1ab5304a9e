"""The common part of all embedding tasks: samples to vectors."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.errors import InputError
from laconic.metrics import Scorer, cosine, cosine_matrix, find_nearest_neighbours, make_mean_scorer, spearman
from laconic.tasks.task import HealingLoss, Tolerance, first

IMAGE_KEYS = ("num_channels", "image_size", "patch_size")
"""Keys of the config.json of models that read images."""


class Embedding:
    """Mixin of tasks whose answers are vectors. Fidelity is the cosine with the original's vector.

    Labels are classes (the metric is the accuracy of the nearest neighbour's class).
    """

    tolerance = Tolerance(mean=0.99, worst=0.95)
    metric: ClassVar[str] = "nearest-neighbour accuracy"
    objective: ClassVar[str] = "text-embedding"
    has_logits: ClassVar[bool] = False

    def parse_label(self, value: Any, sample: Any) -> Any:
        if isinstance(value, (str, int)):
            return value
        raise InputError(f"a label must be the name or the number of a class, not {value!r}; scores are for pairs")

    def decode(self, outputs: Arrays, samples: Sequence[Any]) -> list[Any]:
        return [{"embedding": row} for row in first(outputs)]

    def fidelity(self, reference: Arrays, candidate: Arrays) -> Array:
        return cosine(first(reference), first(candidate))

    def figures(self, reference: Arrays, candidate: Arrays) -> dict[str, float]:
        a, b = first(reference), first(candidate)
        if len(a) < 3:
            return {}
        upper = np.triu_indices(len(a), 1)
        return {
            "similarity_spearman": spearman(cosine_matrix(a)[upper], cosine_matrix(b)[upper]),
            "neighbour_agreement": float((find_nearest_neighbours(a) == find_nearest_neighbours(b)).mean()),
        }

    def healing_losses(self, *, layers: bool) -> dict[HealingLoss, float]:
        """The vectors and their similarities; before them all hidden states, where layers are shared."""
        shared: dict[HealingLoss, float] = {"hidden-states": 1.0} if layers else {}
        return {**shared, "vectors": 1.0, "similarities": 5.0}

    def scorer(self, outputs: Arrays, labels: Sequence[Any]) -> Scorer:
        names = np.array([str(label) for label in labels])
        return make_mean_scorer((names[find_nearest_neighbours(first(outputs))] == names).astype(np.float64))


def has_image_config(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a model which reads images alone."""
    return "vocab_size" not in config and any(name in config for name in IMAGE_KEYS)


def has_two_towers(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a model with an encoder of texts and one of images."""
    return "text_config" in config and "vision_config" in config
