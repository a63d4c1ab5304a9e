"""The inputs of a model's linear and convolutional layers as matrices, and the layers' weights in the same layout."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, unfold
from transformers.pytorch_utils import Conv1D

from laconic.data.batches import batches
from laconic.data.dataset import Dataset
from laconic.models.hooks import forward_hooks
from laconic.models.signature import call
from laconic.tasks.task import Task

Observer = Callable[[str, nn.Module, Tensor], None]
"""Called with a layer's path, the layer and its first input, detached."""

ROWS = 16
"""Samples per forward pass."""


def forward_batches(task: Task, dataset: Dataset, rows: int = ROWS) -> Iterator[dict[str, Tensor]]:
    """Yield the dataset as batches of tensors; samples of similar length share a batch."""
    for _, batch in batches(dataset, task, rows):
        yield {name: torch.tensor(array) for name, array in batch.items()}


def iterate_inputs(
    module: nn.Module, batches: Iterable[Mapping[str, Tensor]], paths: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """Run the model, and yield (path, inputs [count, in] float32) of each layer, batch by batch in execution order."""
    seen: list[tuple[str, Tensor]] = []
    mask: Tensor | None = None

    def observe(path: str, layer: nn.Module, inputs: Tensor) -> None:
        seen.append((path, flatten_inputs(layer, inputs, mask)))

    with observe_inputs(module, paths, observe):
        for batch in batches:
            mask = find_tokens(batch)
            call(module, batch)
            yield from seen
            seen.clear()


def find_tokens(batch: Mapping[str, Tensor]) -> Tensor | None:
    """Return a mask of the tokens of a batch that are no padding, [rows, tokens]; None where nothing tells. The mask of
    a model that writes has ones at the end of a text alone, where the next token is compared."""
    mask = batch.get("attention_mask")
    return None if mask is None else mask.flip(1).cummax(dim=1).values.flip(1)


def observe_inputs(module: nn.Module, paths: Sequence[str], observer: Observer) -> AbstractContextManager[None]:
    """Call the observer with every input of the layers at these paths, inside the `with` block."""
    return forward_hooks(module, paths, before=lambda path, layer, args, _: observer(path, layer, args[0].detach()))


def flatten_inputs(layer: nn.Module, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return a layer's input as the rows that its weight matrix is multiplied with, [count, in] float32.

    mask: [rows, tokens]; masked (padding) tokens are left out. Raises TypeError for another kind of layer.
    """
    if isinstance(layer, nn.Conv2d):
        return unfold_patches(layer, inputs)
    if not isinstance(layer, (nn.Linear, Conv1D)):
        raise TypeError(f"expected a linear layer or a convolution, got {type(layer).__name__}")
    return select_tokens(inputs, mask)


def select_tokens(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the vectors of the tokens that are not padding, [count, width] float32. values: [..., width]; mask: [rows,
    tokens], ignored where the values have other leading dimensions."""
    if mask is not None and values.shape[:-1] == mask.shape:
        return values[mask.bool()].float()
    return values.reshape(-1, values.shape[-1]).float()


def unfold_patches(layer: nn.Conv2d, inputs: Tensor) -> Tensor:
    """Return the patches that a convolution multiplies its kernels with, [count, channels of a group x kernel]
    float32."""
    padding = 0 if isinstance(layer.padding, str) else layer.padding
    if layer.padding == "same" or layer.padding_mode != "zeros":
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        inputs, padding = pad(inputs, padding_sizes(layer), mode=mode), 0
    columns = unfold(inputs, layer.kernel_size, layer.dilation, padding, layer.stride)
    width = layer.in_channels // layer.groups * layer.kernel_size[0] * layer.kernel_size[1]
    rows, _, positions = columns.shape
    return columns.view(rows, layer.groups, width, positions).transpose(2, 3).reshape(-1, width).float()


def padding_sizes(layer: nn.Conv2d) -> list[int]:
    """Return the padding of a convolution's input, [left, right, top, bottom], as `torch.nn.functional.pad` takes
    it."""
    if not isinstance(layer.padding, str):
        return [layer.padding[1], layer.padding[1], layer.padding[0], layer.padding[0]]
    if layer.padding == "valid":
        return [0, 0, 0, 0]
    total = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    return [total[1] // 2, total[1] - total[1] // 2, total[0] // 2, total[0] - total[0] // 2]
