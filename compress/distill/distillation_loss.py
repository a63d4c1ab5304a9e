"""The interface of a loss that compares a student with its teacher."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from compress.distill.hooks import Pass
from compress.distill.layer_mapping import Pair


@dataclass(frozen=True, eq=False)
class Terms:
    """What a batch's loss is a sum of. mask: [rows, places] bool, where there is something; None where everywhere.
    per_place: each place is a term; else each row, with the mean over its places."""

    mask: Tensor | None = None
    per_place: bool = False

    def total(self, errors: Tensor) -> Tensor:
        """The sum over all terms, [] float32. errors: [rows], or [rows, places]."""
        if errors.ndim == 1:
            return errors.sum()
        mask = self.mask if self.mask is not None and self.mask.shape == errors.shape else None
        if mask is None:
            return errors.sum() if self.per_place else errors.mean(dim=1).sum()
        errors = errors.masked_fill(~mask, 0.0)
        return errors.sum() if self.per_place else (errors.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum()


class Imitation(ABC):
    """A loss that is zero where the student is like its teacher.

    compares: whether it compares the rows of a batch with one another. whole: whether it looks at a student that runs
    as a whole. learned: what is learned beside the student, and thrown away afterwards. student, teacher: names of the
    layers whose outputs it reads.
    """

    compares: ClassVar[bool] = False
    whole: ClassVar[bool] = True

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.learned = nn.ModuleList()
        self.student: tuple[str, ...] = ()
        self.teacher: tuple[str, ...] = ()

    def choose(self, student: nn.Module, teacher: nn.Module, pairs: Sequence[Pair]) -> None:  # noqa: B027 - optional
        """Find the layers to read. Raises UsageError where there are none."""

    def fit(self, student: Pass, teacher: Pass) -> None:  # noqa: B027 - optional
        """Look at a pass through both, of the same batch, and make what is learned. Raises UsageError where the two
        cannot be compared."""

    @abstractmethod
    def loss(self, student: Pass, teacher: Pass, terms: Terms) -> Tensor:
        """The sum over the terms of a batch, [] float32."""


def places(hidden: Tensor) -> Tensor:
    """Hidden states as [rows, places, width] float32, whether they are a row's, a sequence's or an image's."""
    if hidden.ndim > 3:
        hidden = hidden.flatten(2).transpose(1, 2)
    return (hidden.unsqueeze(1) if hidden.ndim == 2 else hidden).float()


def relative(found: Tensor, wanted: Tensor) -> Tensor:
    """The squared error over the last axis, as a share of what is wanted, squared."""
    return (found - wanted).square().sum(dim=-1) / wanted.square().sum(dim=-1).clamp(min=1e-6)
