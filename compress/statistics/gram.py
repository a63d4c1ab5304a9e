"""What flows into the layers of a model: the second moments of their inputs, which most of pruning, factorization and
rounding is decided by."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, unfold
from transformers.pytorch_utils import Conv1D

from laconic.data.dataset import Dataset, batches
from laconic.models.signature import call
from laconic.tasks.task import Task

Look = Callable[[str, nn.Module, Tensor], None]
"""Called with a layer's path, the layer, and what goes into it."""

ROWS = 16
"""Samples per forward pass."""


@dataclass
class Moments:
    """Of a layer's inputs x, [in] each: gram: the sum of x xT, [in, in] float32. total: the sum of x, [in] float32.
    count: how many there were."""

    gram: Tensor
    total: Tensor
    count: int

    @property
    def norms(self) -> Tensor:
        """The root of the sum of squares of each input, [in]."""
        return self.gram.diagonal().clamp(min=0).sqrt()


def moments(
    module: nn.Module, task: Task, dataset: Dataset, paths: Sequence[str], *, rows: int = ROWS
) -> dict[str, Moments]:
    """The moments of what goes into the linear or convolutional layers at these paths, over a dataset.

    Padding is not counted, where the samples say by an attention mask which tokens are padding. A convolution's inputs
    are its patches, [channels of a group x kernel], all groups together. Memory is one [in, in] a layer.
    """
    found: dict[str, Moments] = {}
    with torch.inference_mode():
        for path, inputs in flows(module, forward_batches(task, dataset, rows), paths):
            add(found, path, inputs)
    return found


def add(found: dict[str, Moments], path: str, inputs: Tensor) -> None:
    """Count these inputs, [count, in]."""
    if path not in found:
        width = inputs.shape[1]
        found[path] = Moments(inputs.new_zeros(width, width), inputs.new_zeros(width), 0)
    seen = found[path]
    seen.gram.addmm_(inputs.T, inputs)
    seen.total += inputs.sum(dim=0)
    seen.count += len(inputs)


def forward_batches(task: Task, dataset: Dataset, rows: int = ROWS) -> Iterator[dict[str, Tensor]]:
    """The dataset as batches of tensors, samples of like length together."""
    for _, batch in batches(dataset, task, rows):
        yield {name: torch.tensor(array) for name, array in batch.items()}


def flows(
    module: nn.Module, given: Iterable[Mapping[str, Tensor]], paths: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """(path, inputs [count, in] float32) of each of the layers, batch by batch, in the order in which they run."""
    seen: list[tuple[str, Tensor]] = []
    mask: Tensor | None = None

    def look(path: str, layer: nn.Module, inputs: Tensor) -> None:
        seen.append((path, as_rows(layer, inputs, mask)))

    with watched(module, paths, look):
        for batch in given:
            mask = batch.get("attention_mask")
            call(module, batch)
            yield from seen
            seen.clear()


@contextmanager
def watched(module: nn.Module, paths: Sequence[str], look: Look) -> Iterator[None]:
    """Call `look` with every input of the layers at these paths, in the body."""
    handles = []
    for path in paths:
        layer = module.get_submodule(path)

        def hook(layer: nn.Module, args: tuple[Tensor, ...], path: str = path) -> None:
            look(path, layer, args[0].detach())

        handles.append(layer.register_forward_pre_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def as_rows(layer: nn.Module, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
    """A layer's input as [count, in] float32, the tokens that a mask [rows, tokens] leaves out left out."""
    if isinstance(layer, nn.Conv2d):
        return patches(layer, inputs)
    if not isinstance(layer, (nn.Linear, Conv1D)):
        raise TypeError(f"expected a linear layer or a convolution, got {type(layer).__name__}")
    if mask is not None and inputs.shape[:-1] == mask.shape:
        return inputs[mask.bool()].float()
    return inputs.reshape(-1, inputs.shape[-1]).float()


def patches(layer: nn.Conv2d, inputs: Tensor) -> Tensor:
    """What a convolution multiplies its weights with, [count, channels of a group x kernel] float32."""
    padding = 0 if isinstance(layer.padding, str) else layer.padding
    if layer.padding == "same" or layer.padding_mode != "zeros":
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        inputs, padding = pad(inputs, same(layer), mode=mode), 0
    columns = unfold(inputs, layer.kernel_size, layer.dilation, padding, layer.stride)
    width = layer.in_channels // layer.groups * layer.kernel_size[0] * layer.kernel_size[1]
    rows, _, places = columns.shape
    return columns.view(rows, layer.groups, width, places).transpose(2, 3).reshape(-1, width).float()


def same(layer: nn.Conv2d) -> list[int]:
    """What a convolution pads its input with, [left, right, top, bottom], as `pad` takes it."""
    if not isinstance(layer.padding, str):
        return [layer.padding[1], layer.padding[1], layer.padding[0], layer.padding[0]]
    if layer.padding == "valid":
        return [0, 0, 0, 0]
    total = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    return [total[1] // 2, total[1] - total[1] // 2, total[0] // 2, total[0] - total[0] // 2]


def matrix(layer: nn.Module) -> Tensor:
    """A layer's weight as [out, in], in the order of `as_rows`; a view where there is one."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight.T if isinstance(layer, Conv1D) else weight.flatten(1)
