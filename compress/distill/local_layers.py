"""Each layer by itself: from what went into the teacher's to what came out of it."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from compress.distill.distill_stage import Distil
from compress.distill.distillation_loss import Imitation, Terms, places, relative
from compress.distill.hooks import Pass
from compress.distill.layer_mapping import Pair
from laconic.errors import UsageError
from laconic.layerwise.layer_stack import hidden_of
from laconic.tasks.task import Task


class Local(Imitation):
    """The squared error of what each of the student's layers makes of the teacher's input to it, as a share of the
    teacher's output squared; the mean over the layers. Where a layer stands for several of the teacher's, from the
    first one's input to the last one's output.

    No gradient goes from one layer to another, nor to what lies before and behind the layers.
    """

    whole: ClassVar[bool] = False

    def choose(self, student: nn.Module, teacher: nn.Module, pairs: Sequence[Pair]) -> None:
        if not pairs:
            raise UsageError(
                f"there are no layers to learn one by one: {type(teacher).__name__} has no repeated layers that the "
                f"student has too. Take distill.logits, or distill.embedding for vectors"
            )
        self.pairs = tuple(pairs)
        self.teacher = tuple(sorted({name for pair in pairs for name in (pair.first, pair.last)}))

    def fit(self, student: Pass, teacher: Pass) -> None:
        for pair in self.pairs:
            try:
                found = self.output(student.module, teacher, pair)
                relative(places(found), places(teacher.outputs[pair.last]))
            except (RuntimeError, TypeError, ValueError) as error:
                raise UsageError(
                    f"layer {pair.student} of the student does not take what goes into {pair.first} of its teacher, or "
                    f"gives something else ({str(error).splitlines()[0]}); expected the same width. Take "
                    f"distill.features, which learns the step between two widths"
                ) from error

    def output(self, student: nn.Module, teacher: Pass, pair: Pair) -> Tensor:
        """What a layer of the student makes of its teacher's input."""
        args, kwargs = teacher.calls[pair.first]
        return hidden_of(student.get_submodule(pair.student)(*args, **kwargs))

    def loss(self, student: Pass, teacher: Pass, terms: Terms) -> Tensor:
        parts = [
            terms.total(
                relative(places(self.output(student.module, teacher, pair)), places(teacher.outputs[pair.last]))
            )
            for pair in self.pairs
        ]
        return torch.stack(parts).mean()


class Layerwise(Distil):
    """Distil each layer of the original by itself: quick, and the right start where whole layers are new."""

    name: ClassVar[str] = "distill.layerwise"

    def imitations(self, task: Task, layers: int) -> list[Imitation]:
        return [Local()]
