"""Tensor parallelism: each rank computes a part of the attention heads and FFN units of every layer."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from laconic.errors import RecipeError
from laconic.models.repeated_layers import find_layers
from train.parallel.original_module import OriginalModule
from train.parallel.region_randomness import RegionRandomness, has_dropout
from train.parallel.sequence_shards import SequenceShards, change_hidden, change_output, find_blocks
from train.parallel.sharded_head import sharded_cross_entropy
from train.parallel.tensor_plan import FUSED, Styles, TensorPlan
from train.parallel.tensor_styles import (
    KeepWhole,
    SplitInputs,
    Style,
    find_style,
    replace_computation,
    share_gradient_sums,
)
from train.step.step_parts import StepParts

LOCAL_OUTPUTS = ("colwise", "packed_colwise", FUSED)
"""Styles after which each rank has other values, until a layer whose inputs are split."""
SPLIT_INPUTS = ("rowwise", "packed_rowwise")
WHOLE = KeepWhole()
NEEDS_CONFIG = "mla_kv_a_proj"
"""The style of transformers that reads sizes from the config, as an attribute of the layer."""
CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules that are never called, but only hold others."""


def split_layers(parts: StepParts, plan: TensorPlan, mesh: DeviceMesh, *, sequence: bool = False) -> None:
    """Spread the weights of a model over the ranks of `mesh` by a plan (Shoeybi et al., Megatron-LM, arXiv 1909.08053).

    It is called after adapters are added, whose matrices are cut as their layers are, and before anything that takes
    the forward pass of a layer. All parameters become distributed tensors, also those that stay whole: optimizers and
    norms take no mixture. sequence: whether positions are spread between attention and FFN. Raises RecipeError for a
    model whose positions cannot be.
    """
    module = parts.module
    originals = [OriginalModule.of(part) for part in module.modules()]
    named_blocks = find_blocks(module, plan.styles) if sequence else {}
    blocks = list(named_blocks.values())
    styles = plan_adapters(module, plan.styles)
    is_simulated = dist.get_backend(mesh.get_group()) == "fake"  # random numbers have no values then
    if has_dropout(module) and not is_simulated:
        randomness = RegionRandomness(mesh.get_local_rank(), parts.device)
        if blocks:
            randomness.span(blocks[0], blocks[-1])
        else:
            watch_regions(module, styles, randomness)
        parts.add_forward_context(randomness.begin)
    apply_styles(module, styles, mesh, blocks)
    shards = SequenceShards(mesh)
    for home in {name.rpartition(".")[0] for name, style in plan.styles.items() if style in ("colwise", FUSED)}:
        is_spread = any(home.startswith(f"{name}.") for name in named_blocks)
        share_gradient_sums(module.get_submodule(home), shards.gather_for_parts if is_spread else None)
    if blocks:
        spread_positions(module, plan.styles, named_blocks, shards, mesh)
    before = {path: set_count(module, path, count) for path, count in plan.counts.items()}
    for buffer in module.buffers():
        buffer.data = buffer.to(parts.device)
    added = [original.release() for original in originals]

    def undo() -> None:
        for original, names in zip(originals, added, strict=True):
            original.restore(names)
        for path, count in before.items():
            set_count(module, path, count)

    parts.on_restore(undo)
    objective: Any = parts.objective
    plain = getattr(objective, "cross_entropy", None)
    if plain is not None:
        objective.cross_entropy = sharded_cross_entropy
        parts.on_restore(lambda: setattr(objective, "cross_entropy", plain))


def spread_positions(
    module: nn.Module,
    styles: Styles,
    blocks: Mapping[str, nn.Module],
    shards: SequenceShards,
    mesh: DeviceMesh,
) -> None:
    """Let each rank have its positions alone from the first block to the last, save in attention and FFN."""
    for name, style in styles.items():
        if style == "rowwise" and any(name.startswith(f"{block}.") for block in blocks):
            SplitInputs(shards).install_forward(module.get_submodule(name), mesh)
    first, *_, last = blocks.values()
    replace_computation(first, change_hidden(first.forward, shards.scatter))
    replace_computation(last, change_output(last.forward, shards.gather))


def set_count(module: nn.Module, path: str, count: int) -> int:
    """Set an attribute of a module in it, and return what it was."""
    home, _, name = path.rpartition(".")
    owner = module.get_submodule(home)
    before = int(getattr(owner, name))
    setattr(owner, name, count)
    return before


def watch_regions(module: nn.Module, styles: Styles, randomness: RegionRandomness) -> None:
    """Draw other random numbers on each rank between layers of a plan whose outputs and whose inputs are split."""
    first: list[nn.Module] = []
    for name, style in styles.items():
        if style in LOCAL_OUTPUTS and not is_parameter(module, name):
            first.append(module.get_submodule(name))
        elif style in SPLIT_INPUTS and first:
            randomness.watch(first, module.get_submodule(name))
            first = []


def plan_adapters(module: nn.Module, styles: Styles) -> Styles:
    """Add the styles of the matrices of adapters beside the layers that are cut: the matrix that has the layer's
    outputs is cut as these, and the one that has its inputs as those. Raises RecipeError for adapters with dropout."""
    changed: Styles = {}
    for name, style in styles.items():
        layer: Any = module.get_submodule(name) if not is_parameter(module, name) else None
        if not hasattr(layer, "base_layer"):
            changed[name] = style
            continue
        if has_dropout(layer):
            raise RecipeError(
                "mesh: tensor: the dropout of an adapter would be another on each rank, which have the same inputs. "
                "Set dropout: 0"
            )
        changed[f"{name}.base_layer"] = style
        matrices = "lora_A" if style in SPLIT_INPUTS else "lora_B"
        changed |= {f"{name}.{matrices}.{key}": style for key in getattr(layer, matrices)}
    return changed


def is_parameter(module: nn.Module, name: str) -> bool:
    """Return whether a name of a plan is that of a parameter, and not of a module."""
    home, _, leaf = name.rpartition(".")
    return leaf in module.get_submodule(home)._parameters


def apply_styles(module: nn.Module, styles: Styles, mesh: DeviceMesh, blocks: Collection[nn.Module] = ()) -> None:
    """Spread all parameters of a module over the ranks, and let its layers compute with their parts. Tied weights stay
    one tensor. blocks: whose whole weights each rank applies to its own positions."""
    tied: dict[int, nn.Parameter] = {}
    modules = dict(module.named_modules())
    by_words = {id(modules[name].weight) for name, style in styles.items() if style == "embedding_rowwise"}

    def spread_parameters(part: nn.Module, style: Style) -> bool:
        """Returns whether some stay whole that the style says nothing about."""
        is_whole = False
        for name, before in part._parameters.items():
            if before is None or isinstance(before, DTensor):
                continue
            if id(before) not in tied:
                style.shard_param(part, name, mesh)
                if part._parameters[name] is before:
                    WHOLE.shard_param(part, name, mesh)
                    is_whole = True
                tied[id(before)] = drop_other_parts(part, name)
                kept.append(before)
            part._parameters[name] = tied[id(before)]
        return is_whole

    kept: list[nn.Parameter] = []  # so that no id is used again
    for name, style in styles.items():
        if is_parameter(module, name):
            home, _, leaf = name.rpartition(".")
            find_style(style, modules[home]).shard_param(modules[home], leaf, mesh)
            drop_other_parts(modules[home], leaf)
    for name, part in modules.items():
        if layer_style := styles.get(name) or find_tied_style(part, by_words):
            styles = styles | {name: layer_style}
            chosen = find_style(layer_style, part)
            if spread_parameters(part, chosen):
                WHOLE.install_forward(part, mesh)
            if layer_style == NEEDS_CONFIG:
                part.config = find_config(module)
            chosen.install_forward(part, mesh)
    layers = {member: layer for layer in find_layers(module) for member in layer.modules()}
    users: dict[nn.Module, list[nn.Module]] = {}
    for part, is_apart in find_rest(module, "", set(styles)):
        for member in part.modules() if is_apart else (part,):
            spread_parameters(member, WHOLE)
            # A layer may use the weights of the modules in it without calling these.
            users.setdefault(layers.get(member, part), []).append(member)
    for user, members in users.items():
        KeepWhole(members, per_head=user in blocks).install_forward(user, mesh)


def find_config(module: nn.Module) -> Any:
    """Find the config of the language model in a module."""
    return next(part.config.get_text_config() for part in module.modules() if isinstance(part, PreTrainedModel))


def find_tied_style(part: nn.Module, by_words: Collection[int]) -> str | None:
    """Return the style of an output layer that shares its weights with an embedding that is cut by words. by_words: the
    ids of such weights."""
    is_tied = isinstance(part, nn.Linear) and id(part._parameters.get("weight")) in by_words
    return "colwise_gather_output" if is_tied else None


def drop_other_parts(part: nn.Module, name: str) -> nn.Parameter:
    """Free the memory of what other ranks hold of a distributed parameter of a module, and return the parameter."""
    parameter: Any = part._parameters[name]
    local = parameter.to_local()
    if local.untyped_storage().nbytes() > local.nbytes:
        shape = {"shape": parameter.shape, "stride": parameter.stride()}
        alone = DTensor.from_local(
            local.detach().clone(), parameter.device_mesh, parameter.placements, run_check=False, **shape
        )
        part._parameters[name] = parameter = nn.Parameter(alone, requires_grad=parameter.requires_grad)
    kept: nn.Parameter = parameter
    return kept


def find_rest(part: nn.Module, name: str, planned: set[str]) -> Iterator[tuple[nn.Module, bool]]:
    """Yield the modules around all parameters that no plan names, the outermost ones without a planned layer, each with
    True; and with False those with parameters of their own beside planned layers."""
    is_apart = not any(other == name or other.startswith(f"{name}." if name else "") for other in planned)
    if is_apart and not isinstance(part, CONTAINERS):
        if next(part.parameters(), None) is not None:
            yield part, True
        return
    if any(f"{name}.{leaf}".lstrip(".") not in planned for leaf in part._parameters) and name not in planned:
        yield part, False
    for leaf, child in part.named_children():
        yield from find_rest(child, f"{name}.{leaf}".lstrip("."), planned)
