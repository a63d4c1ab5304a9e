"""Weights of layers as matrices, whatever the kind of layer."""

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def as_matrix(layer: nn.Module, tensor: Tensor) -> Tensor:
    """Return a tensor of the shape of a layer's weight as [out, in], in the order of `flatten_inputs`; a view if
    possible."""
    return tensor.T if isinstance(layer, Conv1D) else tensor.flatten(1)


def weight_matrix(layer: nn.Module) -> Tensor:
    """Return a layer's weight as [out, in], in the order of `flatten_inputs`; a view if possible."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return as_matrix(layer, weight)


def get_bias(layer: nn.Module) -> Tensor | None:
    """Return a layer's bias, detached; None if it has none."""
    bias: Tensor | None = layer.bias  # type: ignore[assignment]
    return None if bias is None else bias.detach()


@torch.no_grad()
def write_weight(layer: nn.Module, matrix: Tensor, bias: Tensor | None = None) -> None:
    """Copy other values into a layer's weight, [out, in], and into its bias, [out], if both have one."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    weight.copy_(matrix.T if isinstance(layer, Conv1D) else matrix.reshape(weight.shape))
    present = get_bias(layer)
    if present is not None and bias is not None:
        present.copy_(bias)


def count_uses(module: nn.Module) -> dict[int, int]:
    """Return how many modules hold each parameter, by its id: more than one where weights are tied."""
    uses: dict[int, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return uses
