"""Replace layers of a model by their factors: selection, fit, refit and replay."""

import copy
from collections.abc import Iterator, Mapping, Sequence

from torch import nn
from transformers.pytorch_utils import Conv1D

from compress.factorize.factors import Factorization, make_factors, replace_layer
from compress.factorize.fit_factors import fit_factors
from compress.statistics.layer_weights import count_uses
from compress.statistics.least_squares import refit_layers
from compress.statistics.moments import Moments
from laconic.artifacts.record import Record
from laconic.data.dataset import Dataset
from laconic.errors import UsageError
from laconic.models.checkpoint import Checkpoint
from laconic.models.layer_patterns import match_patterns
from laconic.recipes.stage import TorchContext, TorchStage

PARTS = "parts"
"""The key of a record's structure with the factorization of each replaced layer, by its path."""


def find_factorizable(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, layer) of the linear layers and the ungrouped two-dimensional convolutions whose weight is not tied.

    Layers inside `torch.nn.MultiheadAttention`, which reads their weights itself, are left out.
    """
    uses = count_uses(module)
    inside = tuple(path for path, layer in module.named_modules() if isinstance(layer, nn.MultiheadAttention))
    for path, layer in module.named_modules():
        if not isinstance(layer, (nn.Linear, Conv1D, nn.Conv2d)) or not path:
            continue
        plain = not isinstance(layer, nn.Conv2d) or (layer.groups == 1 and layer.padding_mode == "zeros")
        if plain and uses[id(layer.weight)] == 1 and not path.startswith(inside or ("\0",)):
            yield path, layer


def select_layers(layers: Mapping[str, nn.Module], patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Return the layers that a pattern names. Raises RecipeError for a pattern that names none, if there are layers at
    all."""
    named = match_patterns(layers, patterns if layers else (), "layers", "layer that can be factorized")
    return {path: layer for path, layer in layers.items() if path in named}


def replay_factorization(module: nn.Module, record: Record) -> None:
    """Replace the same layers of an empty module by empty factors."""
    for path, factorization in record.structure[PARTS].items():
        factors = make_factors(module.get_submodule(path), Factorization.model_validate(factorization))
        replace_layer(module, path, factors)


def factorize_layers(
    checkpoint: Checkpoint,
    context: TorchContext,
    stage: TorchStage,
    name: str,
    dataset: Dataset,
    moments: Mapping[str, Moments],
    factorizations: Mapping[str, Factorization],
    *,
    max_error: float = 1.0,
) -> Checkpoint:
    """Return the checkpoint with factorized layers, each fitted by itself, then its last factor to its present inputs.

    moments: of the layers' inputs; a layer without is fitted by its weight alone. max_error: layers whose relative
    squared output error is larger stay as they are. Raises UsageError if all do.
    """
    original, module, errors = checkpoint.module, copy.deepcopy(checkpoint.module), {}
    with context.steps.step(name, len(factorizations)) as step:
        for path, factorization in factorizations.items():
            factors, errors[path] = fit_factors(original.get_submodule(path), moments.get(path), factorization)
            if errors[path] <= max_error:
                replace_layer(module, path, factors)
            step.advance()
        factorizations = {path: made for path, made in factorizations.items() if errors[path] <= max_error}
        if not factorizations:
            raise UsageError(
                f"{name}: none of {len(errors)} layers can be factorized to an error of at most {max_error:.0%}; "
                f"the lowest is {min(errors.values()):.0%}. Allow a larger error and heal afterwards, or ask for less"
            )
        lasts = {path: 2 if made.kind == "bottleneck" else 1 for path, made in factorizations.items()}
        targets = {f"{path}.{last}": path for path, last in lasts.items() if path in moments}
        refit_layers(module, original, checkpoint.task, dataset, targets)
        worst = max(factorizations, key=lambda path: errors[path])
        step.note = f"{len(factorizations)} layers; the largest output error is {errors[worst]:.1%}, of {worst}"
    figures = {"layers": float(len(factorizations)), "largest loss": errors[worst]}
    structure = {PARTS: {path: made.model_dump(mode="json") for path, made in factorizations.items()}}
    return checkpoint.after(stage.make_record(name, checkpoint, context, figures, structure), module)
