"""The common part of all embedding tasks: samples to vectors."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from laconic.arrays import Array, Arrays, first
from laconic.errors import InputError
from laconic.metrics import Scorer, cosine, cosine_matrix, find_nearest_neighbours, make_mean_scorer, spearman
from laconic.tasks.agreement import Agreement, share_of
from laconic.tasks.answer_comparison import Labels
from laconic.tasks.tolerance import Tolerance
from laconic.tasks.training_needs import HealingLoss

IMAGE_KEYS = ("num_channels", "image_size", "patch_size")
"""Keys of the config.json of models that read images."""

FEWEST = 3
"""Fewer vectors have no neighbours to compare."""
SPEARMAN_LEAST, NEIGHBOURS_LEAST, CENTRED_LEAST = 0.9, 0.8, 0.9
"""What the default tolerance requires beside the cosine, which a direction that all vectors share makes high: the rank
correlation of the similarities of all pairs, the share of vectors whose nearest neighbour stays, and the mean cosine
less the mean vector."""


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

    def agreements(self, reference: Arrays, candidate: Arrays, labels: Labels = None) -> Iterator[Agreement]:
        a, b = first(reference), first(candidate)
        if len(a) < FEWEST:
            return
        upper = np.triu_indices(len(a), 1)
        order = spearman(cosine_matrix(a)[upper], cosine_matrix(b)[upper])
        yield Agreement("similarity_spearman", order, SPEARMAN_LEAST)
        kept = int((find_nearest_neighbours(a) == find_nearest_neighbours(b)).sum())
        yield share_of(kept, len(a), "neighbour_agreement", NEIGHBOURS_LEAST)
        centre = a.mean(axis=0)
        yield Agreement("centred_cosine", float(cosine(a - centre, b - centre).mean()), CENTRED_LEAST)

    def healing_losses(self, *, layers: bool) -> dict[HealingLoss, float]:
        """Compare the vectors and their similarities; before them all hidden states, where layers are shared."""
        shared: dict[HealingLoss, float] = {"hidden-states": 1.0} if layers else {}
        return {**shared, "vectors": 1.0, "similarities": 5.0}

    def scorer(self, outputs: Arrays, labels: Sequence[Any]) -> Scorer:
        names = np.array([str(label) for label in labels])
        return make_mean_scorer((names[find_nearest_neighbours(first(outputs))] == names).astype(np.float64))


def has_image_config(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a model which reads images alone."""
    return "vocab_size" not in config and any(name in config for name in IMAGE_KEYS)


def has_two_towers(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a model with an encoder of texts and one of images."""
    return "text_config" in config and "vision_config" in config
