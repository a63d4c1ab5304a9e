"""A student for distillation: the original with fewer layers, or a smaller model built from a changed config."""

import copy
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import nn

from compress.statistics.layer_weights import weight_matrix
from compress.transformer.surgery import BLOCKS, keep_blocks, keep_units
from laconic.artifacts.record import Record
from laconic.errors import RecipeError, SourceError, did_you_mean
from laconic.models import wrappers
from laconic.models.anatomy import Site, anatomy, iterate_configs
from laconic.models.checkpoint import Checkpoint, prepare
from laconic.recipes.stage import Property, TorchContext, TorchStage

SOURCE = "source"
"""The key of a record's structure with the source that the student is built from."""


class Student(TorchStage):
    """Make the model smaller, for a distillation stage to train.

    layers: how many layers stay, evenly spaced from the first to the last, or their indices. config: changed keys of
    the model's config.json (num_hidden_layers, intermediate_size, …); weights are copied from the original where they
    fit, reduced to the most important FFN units, and initialised from the context's seed where they do not. Without
    either, every other layer stays.
    """

    name: ClassVar[str] = "distill.student"
    lossy = True
    breaks: ClassVar[frozenset[Property]] = frozenset({"zeros", "ranges", "factors"})

    layers: int | tuple[int, ...] | None = None
    config: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.layers is not None and self.config:
            raise ValueError("layers and config both define the student; give one of them")
        return self

    def apply(self, checkpoint: Checkpoint, context: TorchContext) -> Checkpoint:
        """Return the smaller model. Raises RecipeError for layers or keys that do not exist, SourceError for a model
        that cannot be made smaller this way."""
        if self.config:
            module, structure = self.build(checkpoint, context)
        else:
            module, structure = self.shorten(checkpoint)
        before, after = (sum(weight.numel() for weight in one.parameters()) for one in (checkpoint.module, module))
        figures = {"parameters before": float(before), "parameters": float(after)}
        made = checkpoint.after(self.make_record(self.name, checkpoint, context, figures, structure), module)
        if made.outputs != checkpoint.outputs:
            ours, theirs = ([list(spec.shape) for spec in one.outputs] for one in (made, checkpoint))
            raise RecipeError(
                f"config: the student's outputs have the shapes {ours}, and the original's {theirs}; expected the "
                f"same, since they are compared. Keep the keys that determine them (hidden_size, for a model that "
                f"embeds)"
            )
        return made

    def shorten(self, checkpoint: Checkpoint) -> tuple[nn.Module, dict[str, Any]]:
        """Return a copy with fewer layers, and what `rebuild` needs."""
        module = copy.deepcopy(checkpoint.module)
        chosen = self.select_layers(len(anatomy(module).sites))
        keep_blocks(module, chosen)
        return module, {BLOCKS: chosen}

    def select_layers(self, count: int) -> list[int]:
        """Return the indices of the layers that stay, of `count`. Raises RecipeError."""
        layers = (count + 1) // 2 if self.layers is None else self.layers
        if isinstance(layers, int):
            if not 1 <= layers <= count:
                raise RecipeError(f"layers: {layers} of {count} cannot stay. Give a number from 1 to {count}")
            return space_evenly(layers, count)
        if not layers or sorted(set(layers)) != list(layers) or not 0 <= layers[0] <= layers[-1] < count:
            raise RecipeError(
                f"layers: {list(layers)} are not ascending indices of the model's layers. Give numbers from 0 to "
                f"{count - 1}, each once"
            )
        return list(layers)

    def build(self, checkpoint: Checkpoint, context: TorchContext) -> tuple[nn.Module, dict[str, Any]]:
        """Return a model built from the changed config, and what `rebuild` needs."""
        source = checkpoint.source
        if source["kind"] != "huggingface":
            raise SourceError(
                f"a model from a {source['kind']} has no config to change. Give layers in its place, or build the "
                f"student in a function of your own"
            )
        changed = [record.stage for record in checkpoint.history if record.structure]
        if changed:
            raise RecipeError(
                f"config: the model no longer matches its config after {changed[-1]}. Put distill.student before it"
            )
        config = source["config"]
        known = set(config).union(*(nested.to_dict() for _, nested in iterate_configs(checkpoint.module)))
        for key in self.config:
            if key not in known:
                raise RecipeError(f"config: the model's config has no key {key!r}. {did_you_mean(key, known)}")
        source = {**source, "config": {**config, **self.config}}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(context.seed)
            module = prepare(wrappers.build(source))
        whole, count = anatomy(checkpoint.module), len(anatomy(module).sites)
        if count > len(whole.sites):
            raise RecipeError(
                f"config: the student has {count} layers, and the original {len(whole.sites)}. Give it fewer"
            )
        stays = space_evenly(count, len(whole.sites))
        copy_weights(module, checkpoint.module, stays)
        return module, {SOURCE: source, BLOCKS: stays}

    @staticmethod
    def rebuild(module: nn.Module, record: Record) -> None:
        """Remove the same layers, or replace the submodules by those of a model built from the student's config."""
        if SOURCE not in record.structure:
            keep_blocks(module, record.structure[BLOCKS])
            return
        for name, child in prepare(wrappers.build(record.structure[SOURCE])).named_children():
            setattr(module, name, child)


@torch.no_grad()
def copy_weights(student: nn.Module, original: nn.Module, kept: Sequence[int]) -> None:
    """Copy weights into a student of the same family as far as they fit: from the layers at these indices, the FFN
    units with the largest weights, and the first entries of every other axis. Entries that the original does not have
    are left as they are."""
    left = copy.deepcopy(original)
    keep_blocks(left, kept)
    for ours, theirs in zip(anatomy(student).of("ffn"), anatomy(left).of("ffn"), strict=True):
        if ours.units < theirs.units:
            keep_units(left, theirs, largest_units(left, theirs, ours.units))
    weights = left.state_dict()
    for name, value in student.state_dict().items():
        if name in weights and weights[name].ndim == value.ndim:
            common = tuple(slice(min(sizes)) for sizes in zip(value.shape, weights[name].shape, strict=True))
            value[common] = weights[name][common]


def largest_units(module: nn.Module, site: Site, count: int) -> list[int]:
    """Return the FFN units with the largest product of the norms of their input and output weights, in ascending
    order."""
    score = weight_matrix(module.get_submodule(site.consumer)).norm(dim=0)
    for source in site.sources:
        score = score * weight_matrix(module.get_submodule(source.layer)).norm(dim=1)
    return sorted(score.argsort(descending=True, stable=True)[:count].tolist())


def space_evenly(count: int, whole: int) -> list[int]:
    """Return `count` indices below `whole`, evenly spaced, including the first and the last."""
    return [0] if count == 1 else [round(index * (whole - 1) / (count - 1)) for index in range(count)]
