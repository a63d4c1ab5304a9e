"""Layers that are selected by name or pattern in a recipe."""

from fnmatch import fnmatch

from laconic.errors import RecipeError
from laconic.quantization.graph import Layer
from laconic.registry import did_you_mean


def match_layers(layers: tuple[Layer, ...], patterns: tuple[str, ...]) -> set[str]:
    """The nodes of the layers that match a pattern. Raises RecipeError for a pattern that matches none."""
    found = set()
    for pattern in patterns:
        hits = {layer.node for layer in layers if fnmatch(layer.node, pattern) or fnmatch(layer.module, pattern)}
        if not hits:
            raise RecipeError(
                f"keep: no layer is named {pattern!r}. {did_you_mean(pattern, (x.module for x in layers))}"
            )
        found |= hits
    return found
