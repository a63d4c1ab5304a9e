"""Layer-wise distillation: each layer by itself, from the teacher's input of the layer to its output."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from compress.distill.distill_stage import DistillStage
from compress.distill.distillation_loss import (
    DistillationLoss,
    ForwardPass,
    LayerPair,
    LossTerms,
    flatten_positions,
    relative_error,
)
from laconic.errors import UsageError
from laconic.tasks.task import Task
from train.layerwise.layer_stack import hidden_of


class LayerwiseLoss(DistillationLoss):
    """The squared error of each student layer's output for the teacher's input, relative to the teacher's square; the
    mean over the layers. A layer that replaces several of the teacher's goes from the first one's input to the last
    one's output.

    No gradient flows from layer to layer, nor to the modules before and after the layers.
    """

    runs_student: ClassVar[bool] = False

    def select_layers(self, student: nn.Module, teacher: nn.Module, pairs: Sequence[LayerPair]) -> None:
        if not pairs:
            raise UsageError(
                f"there are no layers to train one by one: {type(teacher).__name__} has no repeated layers that the "
                f"student has too. Use distill.logits, or distill.embedding for vectors"
            )
        self.pairs = tuple(pairs)
        self.teacher = tuple(sorted({name for pair in pairs for name in (pair.first, pair.last)}))

    def prepare(self, student: ForwardPass, teacher: ForwardPass) -> None:
        for pair in self.pairs:
            try:
                output = self.run_layer(student.module, teacher, pair)
                relative_error(flatten_positions(output), flatten_positions(teacher.outputs[pair.last]))
            except (RuntimeError, TypeError, ValueError) as error:
                raise UsageError(
                    f"layer {pair.student} of the student does not take the input of {pair.first} of its teacher, or "
                    f"has another output ({str(error).splitlines()[0]}); expected the same width. Use "
                    f"distill.features, which trains a projection between two widths"
                ) from error

    def run_layer(self, student: nn.Module, teacher: ForwardPass, pair: LayerPair) -> Tensor:
        """Return the output of a layer of the student for its teacher's input."""
        args, kwargs = teacher.calls[pair.first]
        return hidden_of(student.get_submodule(pair.student)(*args, **kwargs))

    def loss(self, student: ForwardPass, teacher: ForwardPass, terms: LossTerms) -> Tensor:
        parts = [
            terms.sum_errors(
                relative_error(
                    flatten_positions(self.run_layer(student.module, teacher, pair)),
                    flatten_positions(teacher.outputs[pair.last]),
                )
            )
            for pair in self.pairs
        ]
        return torch.stack(parts).mean()


class LayerwiseDistillation(DistillStage):
    """Train each layer on the original's input and output of that layer: quick, and a good start for new layers."""

    name: ClassVar[str] = "distill.layerwise"

    def losses(self, task: Task, layers: int) -> list[DistillationLoss]:
        return [LayerwiseLoss()]
