"""Two zeros in every four weights along a layer's inputs: the pattern that GPUs since Ampere have kernels for."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from compress.prune.pattern import TwoOfFour
from compress.prune.sparsity import sparsify
from compress.prune.sparsity_stage import Zeros
from compress.statistics.gram import matrix
from laconic.recipes.stage import TorchContext

if TYPE_CHECKING:
    from laconic.models.checkpoint import Checkpoint

NAME = "prune.two-four"
FEWEST = 256
"""Channels, of the inputs or the outputs, below which TensorRT was seen to take no sparse kernel (its issue 4065)."""
SHOWN = 3


class TwoFour(Zeros):
    """Two of every four weights along the inputs of each linear layer, or the input channels of each convolution, are
    made zero. Layers whose inputs are no multiple of four are left as they are.

    It pays where the engine has kernels for it: TensorRT with sparse weights, on GPUs since Ampere.
    """

    def apply(self, checkpoint: "Checkpoint", context: TorchContext) -> "Checkpoint":
        own, dataset, chosen = self.begin(checkpoint, context)
        layers = {path: own.module.get_submodule(path) for path in chosen.paths}
        odd = {path: channels(layer)[0] for path, layer in layers.items() if channels(layer)[0] % 4}
        chosen = chosen.without({path: f"its {count} inputs are no multiple of 4" for path, count in odd.items()})
        few = [path for path in chosen.paths if min(channels(layers[path])) < FEWEST]
        with context.steps.step("prune two of every four weights", len(chosen.paths)) as step:
            patterns = {path: TwoOfFour() for path in chosen.paths}
            sparsify(
                own.module,
                context.task,
                dataset,
                patterns,
                self.measure,
                update=self.updates,
                seed=context.seed,
                order=lanes,
            )
            step.note = f"{len(chosen.paths)} layers, {len(chosen.left)} left as they were"
        if few:
            context.steps.warn(
                f"{len(few)} layers have fewer than {FEWEST} channels, for which TensorRT has taken no sparse kernels: "
                f"{', '.join(few[:SHOWN])}{', ...' if len(few) > SHOWN else ''}. Measure, or name them in `keep`"
            )
        return checkpoint.after(self.record(NAME, checkpoint, own.module, chosen, context), own.module)


def channels(layer: nn.Module) -> tuple[int, int]:
    """How many inputs and outputs a layer has, those of one group; a convolution's are its channels."""
    if isinstance(layer, nn.Conv2d):
        return layer.in_channels // layer.groups, layer.out_channels // layer.groups
    outputs, inputs = matrix(layer).shape
    return inputs, outputs


def lanes(layer: nn.Module) -> Tensor | None:
    """The inputs of a convolution [channels x kernel] with the channels of each place of the kernel side by side."""
    if not isinstance(layer, nn.Conv2d):
        return None
    return torch.arange(layer.weight[0].numel()).view(layer.weight.shape[1], -1).T.flatten()
