"""Which parameters are trained, and with which share of the learning rate: freezing, and layer-wise decay."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from laconic.errors import RecipeError, did_you_mean
from laconic.models.repeated_layers import find_layers

COMPILED = "_orig_mod."
"""What torch.compile puts into the names of parameters."""


@dataclass(frozen=True)
class ParameterSettings:
    """freeze: patterns of parameters that are not trained. layer_decay: factor of the learning rate from a repeated
    layer to the one before it; None trains all at the same rate."""

    freeze: tuple[str, ...] = ()
    layer_decay: float | None = None


def freeze_parameters(module: nn.Module, patterns: Sequence[str]) -> list[nn.Parameter]:
    """Freeze the parameters that match a pattern, and return them.

    A pattern is a parameter's name, that of a module around it, or the end of either, from a dot on; `*` is any part of
    a name. Raises RecipeError for a pattern that matches none, and where nothing is left to train.
    """
    named = dict(module.named_parameters())
    frozen: dict[str, nn.Parameter] = {}
    for pattern in patterns:
        matches = {name: parameter for name, parameter in named.items() if is_match(name, pattern)}
        if not matches:
            parts = {part for name in named for part in name.split(".")[:-1] if not part.isdecimal()}
            raise RecipeError(f"freeze: no parameter matches {pattern!r}. {did_you_mean(pattern, parts)}")
        frozen |= matches
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    if frozen and not any(parameter.requires_grad for parameter in named.values()):
        raise RecipeError("freeze: every parameter is frozen, and nothing is left to train. Leave a pattern out")
    return list(frozen.values())


def is_match(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a parameter's name."""
    return any(fnmatchcase(f".{name}", f"*.{pattern}{end}") for end in ("", ".*"))


def make_rate_scale(module: nn.Module, decay: float) -> Callable[[str], float]:
    """Make a function from the name of a parameter to the factor of its learning rate (Clark et al., ELECTRA, arXiv
    2003.10555): 1 after the repeated layers, `decay` in the last of them, and once more for each layer before, with the
    embeddings before the first.

    It also takes the names of adapters within the layers. Raises RecipeError for a model without repeated layers.
    """
    layers = find_layers(module)
    if not layers:
        raise RecipeError(
            f"layer_decay: {type(module).__name__} has no repeated layers. Leave it out, or freeze parameters by name"
        )
    paths = {part: path for path, part in module.named_modules()}
    depths = {f"{paths[layer]}.": depth for depth, layer in enumerate(layers, 1)}
    names = [name for name, _ in module.named_parameters()]
    first = next(index for index, name in enumerate(names) if name.startswith(tuple(depths)))
    before = frozenset(names[:first])

    def scale(name: str) -> float:
        name = name.replace(COMPILED, "")
        depth = next((depth for path, depth in depths.items() if name.startswith(path)), len(layers) + 1)
        return float(decay ** (len(layers) + 1 - (0 if name in before else depth)))

    return scale


def scale_rates(
    module: nn.Module, groups: list[dict[str, Any]], rate: float, scale: Callable[[str], float]
) -> list[dict[str, Any]]:
    """Divide the groups of an optimizer by the learning rate of their parameters, the highest rate first."""
    factors = {parameter: scale(name) for name, parameter in module.named_parameters()}
    divided = []
    for group in groups:
        for factor in sorted({factors[parameter] for parameter in group["params"]}, reverse=True):
            members = [parameter for parameter in group["params"] if factors[parameter] == factor]
            divided.append({**group, "params": members, "lr": rate * factor})
    return sorted(divided, key=lambda group: -float(group["lr"]))
