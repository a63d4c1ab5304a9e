"""Which layers of a model get zeros."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from torch import nn
from transformers.pytorch_utils import Conv1D

from laconic.errors import RecipeError
from laconic.registry import did_you_mean

KEPT = "the recipe keeps it"
TIED = "its weight is another module's too"


@dataclass(frozen=True)
class Chosen:
    """paths: of the layers that get zeros, in the order of the module. left: why others do not, by path."""

    paths: tuple[str, ...]
    left: dict[str, str]

    def without(self, left: Mapping[str, str]) -> "Chosen":
        """The same without these layers. Raises RecipeError where none is left."""
        paths = tuple(path for path in self.paths if path not in left)
        if not paths:
            raise RecipeError(
                f"no layer is left to prune: {'; '.join(f'{path}: {why}' for path, why in list(left.items())[:3])}. "
                f"Name other layers"
            )
        return Chosen(paths, {**self.left, **left})


def choose(module: nn.Module, layers: Sequence[str], keep: Sequence[str]) -> Chosen:
    """The linear and convolutional layers that a pattern of `layers` names and none of `keep`.

    A layer whose weight is also another module's, as the head of a language model that is its table of words, is left
    as it is. Raises RecipeError for a pattern that names no layer, or where none is left.
    """
    found = {path: layer for path, layer in module.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d, Conv1D))}
    named = {key: matching(found, patterns, key) for key, patterns in (("layers", layers), ("keep", keep))}
    uses: dict[int, int] = {}
    for _, weight in module.named_parameters(remove_duplicate=False):
        uses[id(weight)] = uses.get(id(weight), 0) + 1
    tied = {path: TIED for path, layer in found.items() if uses[id(layer.weight)] > 1 and path in named["layers"]}
    kept = {path: KEPT for path in found if path in named["keep"]}
    return Chosen(tuple(path for path in found if path in named["layers"]), {}).without(tied | kept)


def matching(paths: Iterable[str], patterns: Sequence[str], key: str) -> set[str]:
    """The paths that a pattern names. Raises RecipeError for a pattern that names none."""
    hits: set[str] = set()
    for pattern in patterns:
        own = {path for path in paths if fnmatch(path, pattern)}
        if not own:
            raise RecipeError(f"{key}: no layer is named {pattern!r}. {did_you_mean(pattern, paths)}")
        hits |= own
    return hits
