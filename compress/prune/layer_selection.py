"""The layers of a model that are sparsified."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from transformers.pytorch_utils import Conv1D

from compress.statistics.layer_weights import count_uses
from laconic.errors import RecipeError
from laconic.models.layer_patterns import match_patterns

KEPT = "the recipe keeps it"
TIED = "its weight is tied to another module's"


@dataclass(frozen=True)
class LayerSelection:
    """paths: of the layers that are sparsified, in the order of the module. skipped: the reasons why others are not, by
    path."""

    paths: tuple[str, ...]
    skipped: dict[str, str]

    def without(self, skipped: Mapping[str, str]) -> "LayerSelection":
        """The selection without these layers. Raises RecipeError if none is left."""
        paths = tuple(path for path in self.paths if path not in skipped)
        if not paths:
            reasons = "; ".join(f"{path}: {reason}" for path, reason in list(skipped.items())[:3])
            raise RecipeError(f"no layer is left to prune: {reasons}. Name other layers")
        return LayerSelection(paths, {**self.skipped, **skipped})


def select_layers(module: nn.Module, layers: Sequence[str], keep: Sequence[str]) -> LayerSelection:
    """The linear and convolutional layers that a pattern of `layers` names and none of `keep`.

    A layer whose weight is tied to another module's, such as a language model's head to its embedding, is skipped.
    Raises RecipeError for a pattern that names no layer, or if none is left.
    """
    found = {path: layer for path, layer in module.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d, Conv1D))}
    named = match_patterns(found, layers, "layers")
    uses = count_uses(module)
    tied = {path: TIED for path, layer in found.items() if uses[id(layer.weight)] > 1 and path in named}
    kept = match_patterns(found, keep, "keep")
    skipped = tied | {path: KEPT for path in found if path in kept}
    return LayerSelection(tuple(path for path in found if path in named), {}).without(skipped)
