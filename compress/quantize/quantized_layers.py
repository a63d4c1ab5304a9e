"""Which layers a recipe speaks of."""

from fnmatch import fnmatch

from laconic.errors import RecipeError
from laconic.quantization.graph import Layer
from laconic.registry import did_you_mean


def chosen(layers: tuple[Layer, ...], patterns: tuple[str, ...]) -> set[str]:
    """The nodes of the layers that a pattern names. Raises RecipeError for a pattern that names none."""
    found = set()
    for pattern in patterns:
        hits = {layer.node for layer in layers if fnmatch(layer.node, pattern) or fnmatch(layer.module, pattern)}
        if not hits:
            raise RecipeError(
                f"keep: no layer is named {pattern!r}. {did_you_mean(pattern, (x.module for x in layers))}"
            )
        found |= hits
    return found
