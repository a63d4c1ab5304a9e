"""A smaller model to be taught: the original with fewer layers, or built by another config."""

import copy
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import nn

from compress.distill.layer_mapping import BLOCKS
from compress.distill.student_init import inherit, spaced
from compress.transformer.anatomy import anatomy, configs
from compress.transformer.surgery import keep_blocks
from laconic import registry
from laconic.artifacts.record import Record
from laconic.errors import RecipeError, SourceError
from laconic.hashing import code_version, hash_of
from laconic.models import huggingface
from laconic.models.checkpoint import prepare
from laconic.recipes.stage import Property, TorchContext, TorchStage

if TYPE_CHECKING:
    from laconic.models.checkpoint import Checkpoint

SOURCE = "source"
"""In the structure of a record: how the student is built."""


class Student(TorchStage):
    """Make the model smaller, and leave it to a stage that distils to teach it.

    layers: how many stay, evenly spaced from the first to the last, or which, counted from 0. config: keys of the
    model's config.json that are to change (num_hidden_layers, intermediate_size, …); the weights are the original's
    where they fit, cut to the units that matter most, and as drawn from the context's seed where they do not. Without
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
            raise ValueError("layers and config are two ways to a student; give one of them")
        return self

    def apply(self, checkpoint: "Checkpoint", context: TorchContext) -> "Checkpoint":
        """The smaller model. Raises RecipeError for layers or keys that there are not, SourceError for a model that
        cannot be made smaller so."""
        if self.config:
            module, structure = self.built(checkpoint, context)
        else:
            module, structure = self.shortened(checkpoint)
        config = self.model_dump(mode="json")
        key = hash_of(context.key, checkpoint.key, self.name, config, code_version())
        before, after = (sum(each.numel() for each in one.parameters()) for one in (checkpoint.module, module))
        figures = {"parameters before": float(before), "parameters": float(after)}
        made = checkpoint.after(
            Record(stage=self.name, config=config, key=key, figures=figures, structure=structure), module
        )
        if made.outputs != checkpoint.outputs:
            own, theirs = ([list(spec.shape) for spec in one.outputs] for one in (made, checkpoint))
            raise RecipeError(
                f"config: the student answers with {own}, and the original with {theirs}; expected the same, since it "
                f"is compared with it. Keep the keys that decide it (hidden_size, of a model that answers with vectors)"
            )
        return made

    def shortened(self, checkpoint: "Checkpoint") -> tuple[nn.Module, dict[str, Any]]:
        """A copy with fewer layers, and what `rebuild` needs."""
        module = copy.deepcopy(checkpoint.module)
        chosen = self.chosen(len(anatomy(module).sites))
        keep_blocks(module, chosen)
        return module, {BLOCKS: chosen}

    def chosen(self, count: int) -> list[int]:
        """The numbers of the layers that stay, of so many. Raises RecipeError."""
        layers = (count + 1) // 2 if self.layers is None else self.layers
        if isinstance(layers, int):
            if not 1 <= layers <= count:
                raise RecipeError(f"layers: {layers} of {count} cannot stay. Give a number from 1 to {count}")
            return spaced(layers, count)
        if not layers or sorted(set(layers)) != list(layers) or not 0 <= layers[0] <= layers[-1] < count:
            raise RecipeError(
                f"layers: {list(layers)} are not layers of the model in their order. Give numbers from 0 to "
                f"{count - 1}, each once"
            )
        return list(layers)

    def built(self, checkpoint: "Checkpoint", context: TorchContext) -> tuple[nn.Module, dict[str, Any]]:
        """A model by the changed config, and what `rebuild` needs."""
        source = checkpoint.source
        if source["kind"] != "huggingface":
            raise SourceError(
                f"a model from a {source['kind']} has no config to change. Give layers in its place, or build the "
                f"student in a function of your own"
            )
        changed = [record.stage for record in checkpoint.history if record.structure]
        if changed:
            raise RecipeError(
                f"config: the model is not what its config says any more, after {changed[-1]}. Put distill.student "
                f"before it"
            )
        config = source["config"]
        known = set(config).union(*(each.to_dict() for _, each in configs(checkpoint.module)))
        for key in self.config:
            if key not in known:
                raise RecipeError(f"config: the model's config has no key {key!r}. {registry.did_you_mean(key, known)}")
        source = {**source, "config": {**config, **self.config}}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(context.seed)
            module = prepare(huggingface.build(source))
        whole, count = anatomy(checkpoint.module), len(anatomy(module).sites)
        if count > len(whole.sites):
            raise RecipeError(
                f"config: the student has {count} layers, and the original {len(whole.sites)}. Give it fewer"
            )
        stays = spaced(count, len(whole.sites))
        inherit(module, checkpoint.module, stays)
        return module, {SOURCE: source, BLOCKS: stays}

    @staticmethod
    def rebuild(module: nn.Module, record: Record) -> None:
        """Drop the same layers, or take the parts of a module that is built by the student's config."""
        if SOURCE not in record.structure:
            keep_blocks(module, record.structure[BLOCKS])
            return
        for name, child in prepare(huggingface.build(record.structure[SOURCE])).named_children():
            setattr(module, name, child)
