"""The loss of hidden states, through projections where the widths differ."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from compress.distill.distillation_loss import DistillationLoss, LayerPair, LossTerms, flatten_positions, relative_error
from compress.distill.forward_pass import ForwardPass
from laconic.errors import UsageError

Layers = Literal["all", "last"]


class HiddenStateLoss(DistillationLoss):
    """The squared error of the student's hidden states relative to the teacher's square, at each position; the mean
    over the layers (FitNets: Romero et al., 2015, arXiv:1412.6550; TinyBERT: Jiao et al., 2020, arXiv:1909.10351).

    layers: all layers, or the last. project: train a linear layer from the student's width to the teacher's for each
    layer, initialised as the identity and discarded afterwards; by default where the widths differ.
    """

    def __init__(self, layers: Layers = "all", project: bool | None = None, weight: float = 1.0) -> None:
        super().__init__(weight)
        self.layers, self.project = layers, project

    def select_layers(self, student: nn.Module, teacher: nn.Module, pairs: Sequence[LayerPair]) -> None:
        if not pairs:
            raise UsageError(
                f"there are no hidden states to match: {type(teacher).__name__} has no repeated layers that the "
                f"student has too. Use distill.logits, or distill.embedding for vectors"
            )
        chosen = pairs[-1:] if self.layers == "last" else pairs
        self.student = tuple(pair.student for pair in chosen)
        self.teacher = tuple(pair.last for pair in chosen)

    def prepare(self, student: ForwardPass, teacher: ForwardPass) -> None:
        self.auxiliary = nn.ModuleList()
        for own, theirs in zip(self.student, self.teacher, strict=True):
            found, wanted = flatten_positions(student.outputs[own]), flatten_positions(teacher.outputs[theirs])
            if found.shape[:2] != wanted.shape[:2]:
                raise UsageError(
                    f"layer {own} of the student has {found.shape[1]} positions, and {theirs} of its teacher "
                    f"{wanted.shape[1]}: they cannot be compared. Use distill.logits"
                )
            differ = found.shape[2] != wanted.shape[2]
            if differ and self.project is False:
                raise UsageError(
                    f"layer {own} of the student is {found.shape[2]} wide, and {theirs} of its teacher "
                    f"{wanted.shape[2]}. Leave project out, so that a projection between them is trained"
                )
            self.auxiliary.append(make_projection(found, wanted) if self.project or differ else nn.Identity())

    def loss(self, student: ForwardPass, teacher: ForwardPass, terms: LossTerms) -> Tensor:
        total = student.first.new_zeros((), dtype=flatten_positions(student.first[:0]).dtype)
        for own, theirs, project in zip(self.student, self.teacher, self.auxiliary, strict=True):
            found = project(flatten_positions(student.outputs[own])).float()
            total = total + terms.sum_errors(relative_error(found, flatten_positions(teacher.outputs[theirs])))
        return total / len(self.student)


def make_projection(found: Tensor, wanted: Tensor) -> nn.Linear:
    """A linear layer from the student's width to the teacher's, initialised as the identity as far as both go."""
    layer = nn.Linear(found.shape[2], wanted.shape[2], device=found.device)
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
