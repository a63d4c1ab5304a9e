"""Which of two answers is preferred, from the likelihoods of both."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from laconic.arrays import Array
from laconic.data.dataset import Dataset, Samples
from laconic.errors import DataError, RecipeError
from laconic.hashing import hash_of
from laconic.tasks.preference_text import PreferenceText
from laconic.tasks.text_generation import TextGeneration
from laconic.tasks.token_positions import IGNORED
from train.objectives.next_token import BATCH, LEARNED, TextLayout, TokenizedText, answer_prompts
from train.objectives.token_losses import TokenLosses, whole_token_losses
from train.step.objective import TARGETS, Batch, Objective, ObjectiveSettings, to_tensors

REFERENCE = "reference"
"""The log-likelihoods of a pair by the model before training, in nats, [pairs, 2] float32."""
UNKNOWN = (float("nan"), float("nan"))
TIE = 1e-3
"""Nats of a difference between two answers that is rounding, and no preference."""


@dataclass(frozen=True)
class TokenizedPreference:
    """The prompt with either answer. reference: the log-likelihoods of the answers, chosen and rejected, by the model
    before training, in nats; NaN until they are measured."""

    chosen: TokenizedText
    rejected: TokenizedText
    reference: tuple[float, float] = UNKNOWN

    def __len__(self) -> int:
        return max(len(self.chosen), len(self.rejected))


class PreferenceLoss(ObjectiveSettings):
    """The settings of a loss of preferences, and how it is computed.

    Its methods take the log-likelihoods of the answers in nats, and their tokens: both [pairs, 2] float32, of the
    preferred answer first.
    """

    has_reference: ClassVar[bool]
    """Whether the log-likelihoods are differences from those of the model before training."""

    beta: float = Field(default=0.1, gt=0)

    @abstractmethod
    def reward(self, likelihoods: Tensor, tokens: Tensor) -> Tensor:
        """Compute the reward that the model gives each answer, [pairs, 2]."""

    @abstractmethod
    def compute(self, likelihoods: Tensor, tokens: Tensor) -> Tensor:
        """Compute the loss of each pair, [pairs]."""

    def make_objective(self, task: Any) -> Objective:
        """Make the objective. Raises RecipeError for a task that has no answers to prefer."""
        if not task.learns_preferences:
            raise RecipeError(
                f"objective: preferences are learned by language models, and this model is for {task.name}. Leave it "
                f"out"
            )
        return PreferenceObjective(task, self)


class PreferenceObjective(Objective):
    """A loss of preferences, a term per pair. The tensors of a batch are [pairs, 2, ...], the chosen answer first."""

    task: TextGeneration
    takes_parts_of_layers = False

    def __init__(self, task: TextGeneration, preference: PreferenceLoss) -> None:
        super().__init__(task)
        self.has_reference = preference.has_reference
        self.preference = preference
        self.token_losses: TokenLosses = whole_token_losses

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"token_losses": whole_token_losses}  # as of `NextToken`

    def prepare_rows(self, dataset: Dataset) -> Dataset:
        """Tokenize the pairs, truncated to what the model reads."""
        if isinstance(dataset.samples[0], TokenizedPreference):
            return dataset
        pairs: list[TokenizedPreference] = []
        for start in range(0, len(dataset), BATCH):
            samples = dataset.samples[start : start + BATCH]
            for number, sample in enumerate(samples, start):
                if not isinstance(sample, PreferenceText):
                    raise DataError(
                        f"{dataset.describe_sample(number)} has no answers to prefer. Give it 'prompt', 'chosen' and "
                        f"'rejected', or leave the objective out"
                    )
            tokenized = zip(*(self.task.tokenize(texts) for texts in split_answers(samples)), strict=True)
            pairs += [self._make_pair(dataset, number, *parts) for number, parts in enumerate(tokenized, start)]
        return replace(
            dataset,
            samples=Samples(pairs, self.task.parse),
            fingerprint=hash_of(dataset.fingerprint, "preferences", self.task.current_max_length),
            lengths=tuple(map(len, pairs)),
            shapes=((),) * len(pairs),
        )

    def _make_pair(
        self, dataset: Dataset, number: int, chosen: tuple[Array, Array], rejected: tuple[Array, Array]
    ) -> TokenizedPreference:
        """Truncate both texts of a sample. Raises DataError where nothing is left that distinguishes the answers."""
        longest = self.task.current_max_length + 1  # the last token is no input
        one, other = (TokenizedText(*parts).cut(0, longest) for parts in (chosen, rejected))
        pair = TokenizedPreference(one, other)
        if not (pair.chosen.count and pair.rejected.count):
            raise DataError(
                f"{dataset.describe_sample(number)}: the prompt fills the {longest - 1} tokens that the model reads, "
                f"and nothing of an answer is left. Give a larger max_length, or a shorter prompt"
            )
        if np.array_equal(pair.chosen.ids, pair.rejected.ids):
            raise DataError(
                f"{dataset.describe_sample(number)}: both answers are the same tokens within the {longest - 1} that "
                f"the model reads. Give a larger max_length, or remove the row"
            )
        return pair

    def collate(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> Batch:
        texts = [text for pair in samples for text in (pair.chosen, pair.rejected)]
        arrays = TextLayout().rows(texts, self.task.round_up)
        arrays.pop(LEARNED, None)
        batch = {name: tensor.view(len(samples), 2, -1) for name, tensor in to_tensors(arrays).items()}
        if self.has_reference:
            batch[REFERENCE] = torch.tensor([pair.reference for pair in samples])
        return batch

    def count_tokens(self, batch: Batch) -> int:
        mask = batch.get("attention_mask")
        return batch[TARGETS].numel() if mask is None else int(mask.sum())

    def measure_reference(self, module: nn.Module, batch: Batch) -> Tensor:
        """Measure the log-likelihoods of the answers, [pairs, 2] float32 in nats."""
        model: Any = module
        read = {name: batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask") if name in batch}
        hidden, head, targets = model.hidden(**read).flatten(0, 1), model.head, batch[TARGETS]
        bias = getattr(head, "bias", None)
        losses = self.token_losses(hidden, head.weight, bias, targets.flatten(), model.logit_cap)
        return -losses.view(targets.shape).sum(dim=-1)

    def add_reference(self, dataset: Dataset, values: Array) -> Dataset:
        pairs = [
            replace(pair, reference=tuple(likelihoods))
            for pair, likelihoods in zip(dataset.samples, values.tolist(), strict=True)
        ]
        return replace(dataset, samples=Samples(pairs, self.task.parse))

    def _compare(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the log-likelihoods, from those of the reference where there is one, and the tokens of the answers."""
        likelihoods = self.measure_reference(module, batch)
        if REFERENCE in batch:
            likelihoods = likelihoods - batch[REFERENCE]
        return likelihoods, (batch[TARGETS] != IGNORED).sum(dim=-1)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        return self.preference.compute(*self._compare(module, batch)).sum()

    def measure(self, module: nn.Module, batch: Batch) -> dict[str, Tensor]:
        compared = self._compare(module, batch)
        chosen, rejected = self.preference.reward(*compared).unbind(1)
        margins = chosen - rejected
        is_tie = margins.abs() < TIE * self.preference.beta
        return {
            "loss": self.preference.compute(*compared).sum(),
            "reward accuracy": torch.where(is_tie, 0.5, (margins > 0).float()).sum(),
            "reward margin": margins.sum(),
        }

    def interpret_loss(self, loss: float) -> dict[str, float]:
        return {}

    def answer(self, module: nn.Module, samples: Sequence[Any], device: torch.device) -> list[dict[str, str]]:
        return answer_prompts(self.task, module, [pair.chosen for pair in samples], device)

    def make_example(self, rows: int, length: int) -> Batch:
        ids = to_tensors(self.task.typical(2 * rows, length))["input_ids"].view(rows, 2, -1)
        reference = {REFERENCE: torch.zeros(rows, 2)} if self.has_reference else {}
        return {"input_ids": ids, TARGETS: ids.clone(), **reference}


def split_answers(samples: Sequence[PreferenceText]) -> tuple[list[str], list[str]]:
    """Return the texts with the preferred answers, and those with the others."""
    return [sample.chosen for sample in samples], [sample.rejected for sample in samples]
