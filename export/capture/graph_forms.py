"""Forms in which a module computes while it is captured, since a graph can hold them, or engines run them faster."""

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.utils import torch_compilable_check

from export.capture.attention import additive_mask, attention

NAME = "laconic"
"""The name under which transformers knows our implementations."""
IMPLEMENTATIONS = ("_attn_implementation", "_experts_implementation")
"""The settings of a transformers model that say by which function it computes a part."""
AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, additive_mask)


@contextmanager
def graph_forms(module: nn.Module) -> Iterator[None]:
    """Have the module compute, within the context, in forms that a graph can hold."""
    with (
        select_implementations(module),
        replace_name(module, "len", measure_length),
        replace_name(module, torch_compilable_check.__name__, check_shapes_only),
        float_subtraction(),
    ):
        yield


@contextmanager
def select_implementations(module: nn.Module) -> Iterator[None]:
    """Have the transformers models inside the module compute, within the context, some of their parts by our
    functions."""
    configs = [part.config for part in module.modules() if isinstance(part, PreTrainedModel)]
    before = [(config, setting, getattr(config, setting)) for config in configs for setting in IMPLEMENTATIONS]
    for config, setting, _ in before:
        setattr(config, setting, NAME)
    try:
        yield
    finally:
        for config, setting, earlier in before:
            setattr(config, setting, earlier)


@contextmanager
def replace_name(module: nn.Module, name: str, replacement: Any) -> Iterator[None]:
    """Give a name another meaning, within the context, in the modules of Python that define the transformers models
    inside the module: a built-in one in those that have no such name, any other one in those that have it."""
    files = {type(part).__module__ for part in module.modules() if isinstance(part, PreTrainedModel)}
    spaces = [vars(sys.modules[file]) for file in sorted(files)]
    spaces = [space for space in spaces if (name in space) != hasattr(builtins, name)]
    before = [space.get(name) for space in spaces]
    for space in spaces:
        space[name] = replacement
    try:
        yield
    finally:
        for space, original in zip(spaces, before, strict=True):
            if original is None:
                del space[name]
            else:
                space[name] = original


def measure_length(value: Any) -> Any:
    """Return what `len` gives; of a tensor the size of its first axis, which may be a free one.

    `len` of a tensor is always a number of Python, so the axis that it reads would be captured as fixed, though
    `tensor.shape[0]` would not. RT-DETR reads the size of its batch so.
    """
    return value.shape[0] if isinstance(value, Tensor) else builtins.len(value)


def check_shapes_only(condition: Any, *args: Any, **kwargs: Any) -> None:
    """Check what transformers checks, but for conditions on the values of tensors, which a graph does not hold.

    The exporter has no operator for what they leave in the graph. D-FINE compares the sizes of its maps so. Nothing is
    lost: what is captured is compared with the module on batches of several sizes.
    """
    if not isinstance(condition, Tensor):
        torch_compilable_check(condition, *args, **kwargs)


@contextmanager
def float_subtraction() -> Iterator[None]:
    """Convert integers to the default dtype, within the context, before they are subtracted from a fraction, which is
    the dtype that torch gives the difference, as for a mask of padding in `1.0 - mask`.

    torch's exporter decomposes it to a subtraction whose first argument is no tensor, and finds no operator for that.
    """
    subtract_from: Any = Tensor.__rsub__

    def convert_and_subtract(tensor: Tensor, number: Any) -> Any:
        is_mixed = isinstance(number, float) and not (tensor.is_floating_point() or tensor.is_complex())
        return subtract_from(tensor.to(torch.get_default_dtype()) if is_mixed else tensor, number)

    Tensor.__rsub__ = convert_and_subtract  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.__rsub__ = subtract_from  # type: ignore[method-assign]


def compute_all_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the sum of all experts' outputs, weighted by each token's shares, in the interface of transformers.

    transformers picks the tokens of each expert, in a loop whose length depends on the data. A graph has no such loop.
    Here each expert's weights are those of plain layers, which are quantized one by one. The price is arithmetic: all
    experts compute, instead of the two of eight that Mixtral picks.

    hidden_states: [tokens, width]. top_k_index, top_k_weights: the experts of each token and their shares, [tokens, k].
    """
    outputs = []
    for expert in range(module.num_experts):
        share = (top_k_weights * (top_k_index == expert)).sum(dim=-1, keepdim=True)
        inner = apply_layer(module, "gate_up_proj" if module.has_gate else "up_proj", hidden_states, expert)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        output = apply_layer(module, "down_proj", inner, expert)
        outputs.append((module.post_expert_norm(output) if module.has_post_expert_norm else output) * share)
    return torch.stack(outputs).sum(dim=0)


def apply_layer(module: Any, name: str, hidden: Tensor, expert: int) -> Tensor:
    """Apply a linear layer of one expert. name: of the weights of all experts, [experts, out, in], or transposed."""
    weight: Tensor = getattr(module, name)[expert]
    product = hidden @ (weight if module.is_transposed else weight.T)
    return product + getattr(module, f"{name}_bias")[expert] if module.has_bias else product


ALL_EXPERTS_FUNCTIONS.register(NAME, compute_all_experts)
