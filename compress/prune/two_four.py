"""2:4 structured sparsity: the pattern that NVIDIA GPUs since Ampere have kernels for."""

import torch
from torch import Tensor, nn

from compress.prune.sparsity import SparsityStage, measure_sparsity, sparsify
from compress.prune.sparsity_pattern import TwoOfFour
from compress.statistics.layer_weights import weight_matrix
from export.lint.sparsity_rules import LEAST_CHANNELS
from laconic.models.checkpoint import Checkpoint
from laconic.recipes.stage import TorchContext

NAME = "prune.two-four"
NAMED = 3
"""Layers that a warning names."""


class TwoFour(SparsityStage):
    """Make two of every four weights zero along the inputs of each linear layer, or the input channels of each
    convolution. Layers whose number of inputs is no multiple of four are skipped.

    It pays off in engines with kernels for it: TensorRT with sparse weights, on GPUs since Ampere.
    """

    def apply(self, checkpoint: Checkpoint, context: TorchContext) -> Checkpoint:
        copied, dataset, selection = self.prepare(checkpoint, context)
        layers = {path: copied.module.get_submodule(path) for path in selection.paths}
        odd = {path: count_channels(layer)[0] for path, layer in layers.items() if count_channels(layer)[0] % 4}
        selection = selection.without({path: f"its {count} inputs are no multiple of 4" for path, count in odd.items()})
        few = [path for path in selection.paths if min(count_channels(layers[path])) < LEAST_CHANNELS]
        with context.steps.step("prune two of every four weights", len(selection.paths)) as step:
            patterns = {path: TwoOfFour() for path in selection.paths}
            sparsify(
                copied.module,
                context.task,
                dataset,
                patterns,
                self.importance_criterion,
                update=self.compensates,
                seed=context.seed,
                order=channels_innermost,
            )
            step.note = f"{len(selection.paths)} layers, {len(selection.skipped)} skipped"
        if few:
            context.steps.warn(
                f"{len(few)} layers have fewer than {LEAST_CHANNELS} channels, for which TensorRT has used no sparse "
                f"kernels: {', '.join(few[:NAMED])}{', ...' if len(few) > NAMED else ''}. Measure, or name them in "
                "`keep`"
            )
        record = self.make_record(NAME, checkpoint, context, *measure_sparsity(copied.module, selection))
        return checkpoint.after(record, copied.module)


def count_channels(layer: nn.Module) -> tuple[int, int]:
    """Return the inputs and outputs of a layer: features, or channels of one group of a convolution."""
    if isinstance(layer, nn.Conv2d):
        return layer.in_channels // layer.groups, layer.out_channels // layer.groups
    outputs, inputs = weight_matrix(layer).shape
    return inputs, outputs


def channels_innermost(layer: nn.Module) -> Tensor | None:
    """Return the order of a convolution's inputs [channels x kernel] with the channels of one kernel position side by
    side."""
    if not isinstance(layer, nn.Conv2d):
        return None
    return torch.arange(layer.weight[0].numel()).view(layer.weight.shape[1], -1).T.flatten()
