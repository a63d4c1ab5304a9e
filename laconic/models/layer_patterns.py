"""Layers that a recipe names by path or by pattern, of a module or of a captured graph."""

from collections.abc import Collection, Sequence
from fnmatch import fnmatch

from laconic.errors import RecipeError, did_you_mean
from laconic.quantization.graph import Layer


def match_patterns(names: Collection[str], patterns: Sequence[str], key: str, what: str = "layer") -> set[str]:
    """Return the names that at least one of the patterns matches.

    key: the setting that the patterns were given in, for the message. what: what the names stand for. Raises
    RecipeError for a pattern that matches nothing.
    """
    matches: set[str] = set()
    for pattern in patterns:
        matching = {name for name in names if fnmatch(name, pattern)}
        if not matching:
            raise RecipeError(f"{key}: no {what} is named {pattern!r}. {did_you_mean(pattern, names)}")
        matches |= matching
    return matches


def match_layers(layers: tuple[Layer, ...], patterns: tuple[str, ...]) -> set[str]:
    """Return the nodes of the graph's layers that a pattern matches, by the name of the node or of its module.

    Raises RecipeError for a pattern that matches none.
    """
    nodes = {layer.module: layer.node for layer in layers} | {layer.node: layer.node for layer in layers}
    names = match_patterns(nodes, patterns, "keep")
    return {layer.node for layer in layers if layer.node in names or layer.module in names}
