"""The interface of distillation losses, which compare recorded forward passes of a student and its teacher; and the
loss of plain outputs."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from laconic.errors import UsageError
from laconic.models.hooks import forward_hooks
from laconic.models.language_model import LanguageModel
from laconic.models.signature import call
from train.layerwise.layer_stack import hidden_of
from train.step.objective import TARGETS, Batch

LANGUAGE_MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids")
"""The tensors of a batch that a language model reads."""
HIDDEN = "hidden"

TAIL = 0.25
"""The share of a batch's terms, those with the largest errors, that `tail_weight` is for."""


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """One forward pass of a module.

    answers: its outputs by name; of a language model the hidden states of all tokens, [rows, tokens, width], as
    `hidden`. outputs, calls: of the recorded layers, by name: the first tensor that each returned, and its arguments.
    """

    module: nn.Module
    answers: Mapping[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)

    @property
    def first(self) -> Tensor:
        """The first output."""
        return next(iter(self.answers.values()))


def record_forward(module: nn.Module, batch: Batch, names: Collection[str]) -> ForwardPass:
    """Run a module on a batch, and record the layers of these names.

    The hooks are gone in the backward pass, where activation checkpointing runs some layers again.
    """
    seen = ForwardPass(module)

    def record(name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen.calls[name], seen.outputs[name] = (args, kwargs), hidden_of(output)

    with forward_hooks(module, sorted(names), after=record):
        answers = run_model(module, batch)
    return ForwardPass(module, answers, seen.outputs, seen.calls)


def run_model(module: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the module's outputs for the batch's inputs."""
    if isinstance(module, LanguageModel):
        return {HIDDEN: module.hidden(**{name: batch[name] for name in LANGUAGE_MODEL_INPUTS if name in batch})}
    return call(module, {name: tensor for name, tensor in batch.items() if name != TARGETS})


@dataclass(frozen=True)
class LayerPair:
    """A layer of the student by name, and the first and the last of the teacher's layers that it replaces."""

    student: str
    first: str
    last: str


@dataclass(frozen=True, eq=False)
class LossTerms:
    """What a batch's loss is summed over. mask: [rows, positions] bool, True where a position counts; None: all do.
    per_position: each position is a term; otherwise each row, with the mean over its positions. tail_weight: of the
    mean error of the TAIL worst terms, which is added to the mean error of all (the conditional value at risk, as
    in Levy et al., 2020, arXiv:2010.05893)."""

    mask: Tensor | None = None
    per_position: bool = False
    tail_weight: float = 0.0

    def sum_errors(self, errors: Tensor) -> Tensor:
        """Return the sum over all terms, [] float32. errors: [rows], or [rows, positions]."""
        listed = self.list_errors(errors)
        if not self.tail_weight:
            return listed.sum()
        worst = listed.topk(math.ceil(TAIL * len(listed))).values
        return listed.sum() + self.tail_weight * len(listed) * worst.mean()

    def list_errors(self, errors: Tensor) -> Tensor:
        """Return the error of each term, [terms]; 0 where a term does not count. errors: [rows], or [rows,
        positions]."""
        if errors.ndim == 1:
            return errors
        mask = self.mask if self.mask is not None and self.mask.shape == errors.shape else None
        if mask is not None:
            errors = errors.masked_fill(~mask, 0.0)
        if self.per_position:
            return errors.flatten()
        return errors.mean(dim=1) if mask is None else errors.sum(dim=1) / mask.sum(dim=1).clamp(min=1)


class DistillationLoss(ABC):
    """A loss that is zero where the student equals its teacher.

    compares_rows: whether the rows of a batch are compared with one another. runs_student: whether the loss needs a
    forward pass of the whole student. auxiliary: modules that are trained beside the student and discarded afterwards.
    student, teacher: names of the layers whose outputs are compared.
    """

    compares_rows: ClassVar[bool] = False
    runs_student: ClassVar[bool] = True

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.auxiliary = nn.ModuleList()
        self.student: tuple[str, ...] = ()
        self.teacher: tuple[str, ...] = ()

    def select_layers(self, student: nn.Module, teacher: nn.Module, pairs: Sequence[LayerPair]) -> None:  # noqa: B027
        """Choose the layers to compare. Raises UsageError if there are none. By default none are compared."""

    def prepare(self, student: ForwardPass, teacher: ForwardPass) -> None:  # noqa: B027 - optional
        """Check that passes of both models over the same batch can be compared, and make the auxiliary modules. Raises
        UsageError if they cannot."""

    @abstractmethod
    def loss(self, student: ForwardPass, teacher: ForwardPass, terms: LossTerms) -> Tensor:
        """Return the sum over the terms of a batch, [] float32."""


class OutputLoss(DistillationLoss):
    """The squared error of each output relative to the teacher's square, for each row; the mean over the outputs.

    On logits it is the loss of Ba & Caruana (Do Deep Nets Really Need to be Deep?, 2014, arXiv:1312.6184). Outputs that
    are not floating-point numbers are left out.
    """

    def prepare(self, student: ForwardPass, teacher: ForwardPass) -> None:
        shapes, theirs = ([list(answer.shape) for answer in seen.answers.values()] for seen in (student, teacher))
        if shapes != theirs:
            raise UsageError(
                f"the student's outputs have the shapes {shapes}, and its teacher's {theirs}; expected the same. Keep "
                f"the model's outputs as they were"
            )

    def loss(self, student: ForwardPass, teacher: ForwardPass, terms: LossTerms) -> Tensor:
        both = list(zip(student.answers.values(), teacher.answers.values(), strict=True))
        errors = [
            relative_error(output.flatten(1).float(), target.flatten(1).float())
            for output, target in both
            if target.is_floating_point()
        ]
        return terms.sum_errors(sum(errors[1:], errors[0]) / len(errors))


def flatten_positions(hidden: Tensor) -> Tensor:
    """Reshape hidden states to [rows, positions, width] float32, whether of a row, of a sequence or of an image."""
    if hidden.ndim > 3:
        hidden = hidden.flatten(2).transpose(1, 2)
    return (hidden.unsqueeze(1) if hidden.ndim == 2 else hidden).float()


def relative_error(output: Tensor, target: Tensor) -> Tensor:
    """Return the squared error over the last axis, as a share of the squared target."""
    return (output - target).square().sum(dim=-1) / target.square().sum(dim=-1).clamp(min=1e-6)
