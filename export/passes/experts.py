"""Mixtures of experts in a form that a graph can hold: every expert on every token, weighted by its share of it.

transformers picks the tokens of each expert, in a loop whose length depends on the data. A graph has no such loop. Here
each expert's weights are those of plain layers, which are quantized one by one. The price is arithmetic: all experts
compute, instead of the two of eight that Mixtral picks.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from export.passes.implementation import select_implementation

NAME = "laconic"


def compute_all_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weighted sum of the experts' outputs, in the interface of transformers.

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


def plain_experts(module: nn.Module) -> AbstractContextManager[None]:
    """A context in which mixtures of experts of transformers inside the module compute all experts."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, compute_all_experts)
    return select_implementation(module, "_experts_implementation", NAME)
