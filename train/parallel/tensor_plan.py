"""Plans of tensor parallelism: which layers of a model are cut over ranks, and how, as data."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from laconic.errors import RecipeError, SourceError
from laconic.models.anatomy import Site, anatomy
from laconic.models.block_shape import BlockShape, find_shape

Styles = dict[str, str]
"""By the name of a module or a parameter, the style in which it is cut, under the name that transformers gives it:
colwise (by output features, each rank keeps its own), rowwise (by input features, outputs are summed over the ranks),
packed_colwise (two layers in one), embedding_rowwise (by vocabulary) and so on; or a style of ours."""

FUSED = "fused_colwise"
"""Queries, keys and values that one layer computes one after the other."""
PER_HEAD = "replicated_with_grad_allreduce"
"""A whole weight that each rank applies to its own heads: what the ranks learn of it is summed."""
COUNTS = ("num_key_value_heads", "num_attention_heads")


@dataclass(frozen=True)
class TensorPlan:
    """How a model is cut. styles: of its layers. counts: by path, attributes that hold the number of heads, or the
    width of all heads, and their values on each rank."""

    styles: Styles
    counts: Mapping[str, int] = field(default_factory=dict)

    def select(self, module: nn.Module) -> "TensorPlan":
        """Select the layers that have their weights on this rank."""
        homes = {name for name, part in module.named_modules() if next(part.parameters(), None) is not None}
        present = homes | {name for name, _ in module.named_parameters(remove_duplicate=False)}
        return TensorPlan({name: style for name, style in self.styles.items() if name in present}, self.counts)


def make_plan(module: nn.Module, size: int) -> TensorPlan:
    """Make the plan of a model for `size` ranks: from the config of its architecture where transformers has one, else
    from its structure. Raises RecipeError where the ranks do not divide it, or nothing in it can be cut."""
    for name, part in module.named_modules():
        if isinstance(part, PreTrainedModel):
            if styles := read_config_plan(part):
                check_heads(part, styles, size)
                return TensorPlan({f"{name}.{key}".lstrip("."): style for key, style in styles.items()})
            break
    return derive_plan(module, size)


def read_config_plan(model: Any) -> Styles:
    """Read the plan that transformers has for an architecture, with the name of each layer; empty without one."""
    patterns: Mapping[str, str] = model.tp_plan
    if not any("*" in pattern for pattern in patterns):
        return {}
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    return {name: patterns[key] for name in names if (key := re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)) in patterns}


def check_heads(model: Any, styles: Styles, size: int) -> None:
    """Raise RecipeError where the ranks do not divide the heads or the units of the layers that a plan cuts."""
    config = model.config.get_text_config()
    cut = {name.rpartition(".")[2] for name, style in styles.items() if style == "colwise"}
    if cut & {"k_proj", "v_proj", "qkv_proj", "query_key_value"}:
        for key in COUNTS:
            if isinstance(heads := getattr(config, key, None), int):
                check_division(heads, key.removeprefix("num_").replace("_", " "), size)
    layers = dict(model.named_modules())
    for name, style in styles.items():
        if style in ("colwise", "packed_colwise") and isinstance(layer := layers.get(name), nn.Linear):
            check_division(layer.out_features, f"outputs of {name}", size)


def check_division(count: int, units: str, size: int) -> None:
    """Raise RecipeError where `size` ranks do not divide a number of units."""
    if count % size:
        raise RecipeError(
            f"mesh: tensor: {size} does not divide the {count} {units} of this model. Choose a divisor of "
            f"{gcd(count, size) if gcd(count, size) > 1 else count}"
        )


def derive_plan(module: nn.Module, size: int) -> TensorPlan:
    """Derive a plan from the shapes of a model's layers: attention heads and FFN units of each block, the vocabulary of
    the embedding and of the head. Raises RecipeError."""
    try:
        body = anatomy(module)
    except SourceError as error:
        raise RecipeError(f"mesh: tensor: {error}") from error
    styles: Styles = {}
    counts: dict[str, int] = {}
    for root, sites in zip(body.blocks, body.sites, strict=True):
        block = module.get_submodule(root)
        shape = find_shape(block)
        assert shape is not None
        if "heads" in sites and (layers := plan_heads(block, shape, sites["heads"])):
            check_division(sites["heads"].units, "attention heads", size)
            styles |= {f"{root}.{name}": style for name, style in layers.items()}
            counts |= {path: each * sites["heads"].units // size for path, each in sites["heads"].counts.items()}
        if "ffn" in sites and not shape.between and shape.down is not None:
            check_division(sites["ffn"].units, "FFN units", size)
            style = "packed_colwise" if shape.gated_in_one else "colwise"
            styles |= {f"{root}.{path}": style for path in shape.up} | {f"{root}.{shape.down}": "rowwise"}
    if not styles:
        raise RecipeError(
            f"mesh: tensor: {type(module).__name__} has no attention heads or FFN units that can be cut. Set shard"
        )
    return TensorPlan(styles | dict(plan_vocabulary(module)), counts)


def plan_heads(block: nn.Module, shape: BlockShape, site: Site) -> Styles:
    """Plan the layers of one attention, by their paths in the block; empty where its heads cannot be computed apart."""
    if site.tables or site.keys or (shape.fused and not shape.interleaved and shape.keys != shape.heads):
        return {}
    style = FUSED if shape.fused and not shape.interleaved else "colwise"
    styles: Styles = dict.fromkeys(shape.projections, style) | {shape.out: "rowwise"}
    for path, part in block.get_submodule(shape.attention).named_modules():
        name = f"{shape.attention}.{path}"
        weights = [weight.shape for _, weight in part.named_parameters(recurse=False)]
        if not weights or name in styles:
            continue
        if any(weight != (shape.head_width,) for weight in weights):
            return {}
        styles[name] = PER_HEAD
    return styles


def plan_vocabulary(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the styles of the input embedding and of the output layer over the same vocabulary."""
    model = next((part for part in module.modules() if isinstance(part, PreTrainedModel)), None)
    if model is None:
        return
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    for name, part in module.named_modules():
        if part is table and isinstance(part, nn.Embedding):
            yield name, "embedding_rowwise"
        elif part is head and isinstance(part, nn.Linear):
            yield name, "colwise_gather_output"
