"""The teacher's hidden states as targets."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from torch import Tensor, nn

from compress.distill.distill_stage import Distil
from compress.distill.distillation_loss import Imitation, Terms, places, relative
from compress.distill.hooks import Pass
from compress.distill.layer_mapping import Pair
from laconic.errors import UsageError
from laconic.tasks.task import Task

Layers = Literal["all", "last"]


class Hidden(Imitation):
    """The squared error of the student's hidden states, as a share of the teacher's squared, at each place; the mean
    over the layers (FitNets: Romero et al., 2015, arXiv:1412.6550; TinyBERT: Jiao et al., 2020, arXiv:1909.10351).

    project: learn a linear layer from the student's width to the teacher's for each layer, thrown away afterwards; by
    default where the widths differ. It begins as the identity.
    """

    def __init__(self, layers: Layers = "all", project: bool | None = None, weight: float = 1.0) -> None:
        super().__init__(weight)
        self.layers, self.project = layers, project

    def choose(self, student: nn.Module, teacher: nn.Module, pairs: Sequence[Pair]) -> None:
        if not pairs:
            raise UsageError(
                f"there are no hidden states to match: {type(teacher).__name__} has no repeated layers that the "
                f"student has too. Take distill.logits, or distill.embedding for vectors"
            )
        chosen = pairs[-1:] if self.layers == "last" else pairs
        self.student = tuple(pair.student for pair in chosen)
        self.teacher = tuple(pair.last for pair in chosen)

    def fit(self, student: Pass, teacher: Pass) -> None:
        self.learned = nn.ModuleList()
        for own, theirs in zip(self.student, self.teacher, strict=True):
            found, wanted = places(student.outputs[own]), places(teacher.outputs[theirs])
            if found.shape[:2] != wanted.shape[:2]:
                raise UsageError(
                    f"layer {own} of the student has {found.shape[1]} places, and {theirs} of its teacher "
                    f"{wanted.shape[1]}: there is no way to compare them. Take distill.logits"
                )
            differ = found.shape[2] != wanted.shape[2]
            if differ and self.project is False:
                raise UsageError(
                    f"layer {own} of the student is {found.shape[2]} wide, and {theirs} of its teacher "
                    f"{wanted.shape[2]}. Leave project out, so that the step between them is learned"
                )
            self.learned.append(projection(found, wanted) if self.project or differ else nn.Identity())

    def loss(self, student: Pass, teacher: Pass, terms: Terms) -> Tensor:
        total = student.first.new_zeros((), dtype=places(student.first[:0]).dtype)
        for own, theirs, project in zip(self.student, self.teacher, self.learned, strict=True):
            found = project(places(student.outputs[own])).float()
            total = total + terms.total(relative(found, places(teacher.outputs[theirs])))
        return total / len(self.student)


def projection(found: Tensor, wanted: Tensor) -> nn.Linear:
    """From the student's width to the teacher's: the identity, as far as they go together."""
    layer = nn.Linear(found.shape[2], wanted.shape[2], device=found.device)
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class Features(Distil):
    """Distil the hidden states of the original's layers. layers: all, or the last alone. project: as the imitation."""

    name: ClassVar[str] = "distill.features"

    layers: Layers = "all"
    project: bool | None = None

    def imitations(self, task: Task, layers: int) -> list[Imitation]:
        return [Hidden(self.layers, self.project)]
