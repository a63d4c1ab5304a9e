"""The most tokens of a sample."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from laconic.arrays import Arrays
from laconic.errors import UsageError
from laconic.tasks.named_task import NamedTask


class TokenLimits(NamedTask):
    """How many tokens a sample may have; for tasks that read none, the defaults limit nothing."""

    @property
    def max_length(self) -> int | None:
        """The most tokens that the model takes; None where the task does not read tokens."""
        return None

    def truncated(self, length: int | None) -> AbstractContextManager[None]:
        """Truncate samples to `length` tokens in the body; None changes nothing.

        Raises UsageError where samples are no tokens.
        """
        if length is None:
            return nullcontext()
        raise UsageError(f"max_length is for texts, and this model is for {self.name}. Leave it out")

    def padded(self, multiple: int) -> AbstractContextManager[None]:
        """Pad the texts of a batch to a multiple of so many tokens in the body, where samples are texts."""
        return nullcontext()

    def count_tokens(self, inputs: Arrays) -> int:
        """The tokens of an encoded batch without its padding; 0 where the task does not read tokens."""
        return 0

    def limit_ids(self, count: int) -> None:
        """Take no tokens with ids from `count` on, as the model has no embeddings for them."""
        return

    def check_samples(self, samples: Sequence[Any]) -> None:
        """Raise InputError for a sample that the model has no embeddings for."""
        return

    def count_cut(self, samples: Sequence[Any]) -> int:
        """How many of these samples are longer than the model takes, so that their ends are cut off."""
        return 0
