"""Which layers of a model can be taken apart."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import TYPE_CHECKING

from torch import nn
from transformers.pytorch_utils import Conv1D

from compress.factorize.fit import imitate
from compress.factorize.parts import Shape, put, split
from compress.statistics.gram import Moments
from compress.statistics.refit import refit
from laconic.artifacts.record import Record
from laconic.data.dataset import Dataset
from laconic.errors import RecipeError, UsageError
from laconic.hashing import code_version, hash_of
from laconic.recipes.stage import Stage, TorchContext, dump_settings
from laconic.registry import did_you_mean

if TYPE_CHECKING:
    from laconic.models.checkpoint import Checkpoint

PARTS = "parts"
"""The key of a record's structure: the shape of what a layer was replaced with, by its path."""


def separate(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The linear layers, and the convolutions in two dimensions and one group, whose weight is no one else's.

    Layers inside torch's own attention are left out, which reads their weights itself.
    """
    uses: dict[int, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    inside = tuple(path for path, layer in module.named_modules() if isinstance(layer, nn.MultiheadAttention))
    for path, layer in module.named_modules():
        if not isinstance(layer, (nn.Linear, Conv1D, nn.Conv2d)) or not path:
            continue
        plain = not isinstance(layer, nn.Conv2d) or (layer.groups == 1 and layer.padding_mode == "zeros")
        if plain and uses[id(layer.weight)] == 1 and not path.startswith(inside or ("\0",)):
            yield path, layer


def named(layers: Mapping[str, nn.Module], patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The layers that a pattern names. Raises RecipeError for a pattern that names none."""
    for pattern in patterns:
        if layers and not any(fnmatch(path, pattern) for path in layers):
            raise RecipeError(
                f"layers: no layer that can be taken apart is named {pattern!r}. {did_you_mean(pattern, layers)}"
            )
    return {path: layer for path, layer in layers.items() if any(fnmatch(path, pattern) for pattern in patterns)}


def replay(module: nn.Module, record: Record) -> None:
    """Put empty parts in the place of the layers that were replaced."""
    for path, shape in record.structure[PARTS].items():
        put(module, path, split(module.get_submodule(path), Shape.model_validate(shape)))


def replaced(
    checkpoint: "Checkpoint",
    context: TorchContext,
    stage: Stage,
    name: str,
    dataset: Dataset,
    seen: Mapping[str, Moments],
    shapes: Mapping[str, Shape],
    *,
    most: float = 1.0,
) -> "Checkpoint":
    """The checkpoint with layers taken apart, each fitted alone first, then its last part to what reaches it now.

    seen: the moments of the layers' inputs; a layer without is fitted by its weight alone. most: a layer of whose
    answers more is lost, as a share of their square, stays as it is. Raises UsageError where all stay.
    """
    original, module, errors = checkpoint.module, copy.deepcopy(checkpoint.module), {}
    with context.steps.step(name, len(shapes)) as step:
        for path, shape in shapes.items():
            parts, errors[path] = imitate(original.get_submodule(path), seen.get(path), shape)
            if errors[path] <= most:
                put(module, path, parts)
            step.advance()
        shapes = {path: shape for path, shape in shapes.items() if errors[path] <= most}
        if not shapes:
            raise UsageError(
                f"{name}: none of {len(errors)} layers can be imitated to within {most:.0%} of its answers; the best "
                f"loses {min(errors.values()):.0%}. Allow a larger loss, and heal afterwards, or ask for less"
            )
        lasts = {f"{path}.{2 if shape.kind == 'bottleneck' else 1}": path for path, shape in shapes.items()}
        refit(module, original, checkpoint.task, dataset, {last: path for last, path in lasts.items() if path in seen})
        worst = max(shapes, key=lambda path: errors[path])
        step.note = f"{len(shapes)} layers; {worst} loses most, {errors[worst]:.1%} of its answers"
    key = hash_of(context.key, checkpoint.key, name, dump_settings(stage), code_version())
    figures = {"layers": float(len(shapes)), "largest loss": errors[worst]}
    structure = {PARTS: {path: shape.model_dump(mode="json") for path, shape in shapes.items()}}
    return checkpoint.after(
        Record(stage=name, config=dump_settings(stage), key=key, figures=figures, structure=structure), module
    )
