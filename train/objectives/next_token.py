"""Each token of a text, from those before it."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from laconic.arrays import Array, Arrays
from laconic.data.dataset import Dataset, Samples
from laconic.errors import DataError
from laconic.hashing import hash_of
from laconic.models.language_model import cap_logits
from laconic.tasks.chat_template import MarkedText
from laconic.tasks.text_generation import TextGeneration
from laconic.tasks.token_positions import IGNORED
from train.objectives.logit_gradients import sum_cross_entropy
from train.objectives.row_positions import AllPositions
from train.step.objective import TARGETS, Batch, Objective, to_tensors

LinearCrossEntropy = Callable[[Tensor, Tensor, Tensor | None, Tensor, float | None], Tensor]
"""(hidden [tokens, width], weight [vocab, width], bias [vocab] or None, targets [tokens] int64, cap of the logits or
None) to the summed loss, [] float32; a target of IGNORED counts nothing."""

FILLED, LEARNED = "filled", "learned"
"""How many tokens each row holds, [rows] int64: given where there is no mask, and not all rows are full. How many of
its targets are learned, [rows] int64: given where not all are."""
LONGEST, OPENING = 64, 8
"""The most tokens of a generated answer, and of the opening of a document that is the prompt."""
BATCH = 64
"""Texts that are tokenized at a time: of 1,000, the tokenizer's threads keep 1.3 MiB more than of 64."""


def whole_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, cap: float | None = None
) -> Tensor:
    """Sum the loss, with the logits of all tokens at once."""
    return sum_cross_entropy(cap_logits(linear(hidden, weight, bias).float(), cap), targets)


@dataclass(frozen=True)
class TokenizedText:
    """ids: [tokens] int64. learned: whether each token is a target, [tokens] bool; the first one never is."""

    ids: Array
    learned: Array

    @classmethod
    def of(cls, ids: Array) -> "TokenizedText":
        """Make a text of which every token is learned."""
        return cls(ids, np.ones(len(ids), bool))

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, start: int, stop: int) -> "TokenizedText":
        """Cut out the tokens from start to stop."""
        return TokenizedText(self.ids[start:stop], self.learned[start:stop])

    @property
    def count(self) -> int:
        """How many tokens are learned."""
        return int(self.learned[1:].sum())


class NextToken(Objective):
    """Cross-entropy of each next token; a term per token that is to be predicted.

    A text's last token is never read, since nothing follows it: n tokens are n - 1 inputs and n - 1 targets. Where the
    answers of a text are marked, their tokens alone are targets. Without padding a batch has no attention mask, so that
    the fast kernels of causal attention are taken.
    """

    task: TextGeneration

    def __init__(self, task: TextGeneration) -> None:
        super().__init__(task)
        self.cross_entropy: LinearCrossEntropy = whole_logits
        self.layout = TextLayout()
        self.positions = AllPositions()

    def __getstate__(self) -> dict[str, Any]:
        # What makes batches in another process needs no loss, which may hold the model or other ranks.
        return vars(self) | {"cross_entropy": whole_logits, "positions": AllPositions()}

    def prepare_rows(self, dataset: Dataset) -> Dataset:
        """Tokenize the texts, ended by the end token. One that is longer than the model reads becomes several blocks,
        each of which begins with the token that the one before ends with, so that each token is a target once. Chats
        and completions are truncated instead, and left out where nothing of an answer remains.
        """
        if isinstance(dataset.samples[0], TokenizedText):
            return dataset
        longest = self.task.current_max_length + 1  # the last token is no input
        rows: list[tuple[str, TokenizedText]] = []
        for start in range(0, len(dataset), BATCH):
            samples = dataset.samples[start : start + BATCH]
            for number, (ids, learned) in enumerate(self.task.tokenize(samples), start):
                text = TokenizedText(ids, learned)
                marked = isinstance(dataset.samples[number], MarkedText)
                begins = range(0, 1 if marked else max(len(text) - 1, 1), longest - 1)
                blocks = [text.cut(begin, begin + longest) for begin in begins]
                rows += [(dataset.keys[number], block) for block in blocks if block.count]
        if not rows:
            raise DataError(
                f"{dataset.name}: no text has a token to learn that follows another within {longest - 1} tokens. Give "
                f"longer texts, or a larger max_length"
            )
        return Dataset(
            name=dataset.name,
            samples=Samples([text for _, text in rows], self.task.parse),
            labels=None,
            fingerprint=hash_of(dataset.fingerprint, "tokenized", longest),
            keys=tuple(key for key, _ in rows),
            lengths=tuple(len(text) for _, text in rows),
            shapes=((),) * len(rows),
        )

    def texts(self, samples: Sequence[Any]) -> list[TokenizedText]:
        """Tokenize samples, truncated to what the model reads; the last token of each is only a target. Raises
        DataError where all are too short."""
        if isinstance(samples[0], TokenizedText):
            return list(samples)
        longest = self.task.current_max_length + 1
        texts = [TokenizedText(*parts).cut(0, longest) for parts in self.task.tokenize(samples)]
        texts = [text for text in texts if text.count]
        if not texts:
            raise DataError(
                "no text of a batch has two tokens, so that none follows another. Give longer texts, or a larger batch"
            )
        return texts

    def collate(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> Batch:
        return to_tensors(self.layout.rows(self.texts(samples), self.task.round_up))

    def count_terms(self, batch: Batch) -> int:
        return int(batch[LEARNED].sum()) if LEARNED in batch else self.count_tokens(batch)

    def count_tokens(self, batch: Batch) -> int:
        # An input that is no padding has a target, and the other way round.
        counts = batch.get("attention_mask", batch.get(FILLED))
        return batch[TARGETS].numel() if counts is None else int(counts.sum())

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        model: Any = module
        with self.positions.select(batch) as part:
            read = {name: part[name] for name in ("input_ids", "attention_mask", "position_ids") if name in part}
            hidden = model.hidden(**read).flatten(0, 1)
            head, targets = model.head, part[TARGETS].flatten()
            return self.cross_entropy(hidden, head.weight, getattr(head, "bias", None), targets, model.logit_cap)

    def measure(self, module: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"loss": self.positions.sum(self.loss(module, batch))}

    def answer(self, module: nn.Module, samples: Sequence[Any], device: torch.device) -> list[dict[str, str]]:
        return answer_prompts(self.task, module, samples, device)

    def make_example(self, rows: int, length: int) -> Batch:
        ids = to_tensors(self.task.typical(rows, length))["input_ids"]
        return {"input_ids": ids, TARGETS: ids.clone()} | to_tensors(self.layout.make_example(*ids.shape))


class TextLayout:
    """A row for each text."""

    def rows(self, texts: Sequence[TokenizedText], round_up: Callable[[int], int]) -> Arrays:
        """Make input_ids and targets, [rows, width] int64, and what else the model and `count_terms` must be told.
        round_up: from the longest text to the width, where texts are padded."""
        widths = [len(text) - 1 for text in texts]
        width = round_up(max(widths))
        is_padded = min(widths) < width
        arrays = blank(len(texts), width)
        if is_padded:
            arrays["attention_mask"] = np.zeros((len(texts), width), np.int64)
        for row, text in enumerate(texts):
            write(arrays, text, row, 0)
            if is_padded:
                arrays["attention_mask"][row, : widths[row]] = 1
        return arrays | count_learned(texts, [[row] for row in range(len(texts))])

    def make_example(self, rows: int, width: int) -> Arrays:
        """Make what full rows have beside input_ids and targets."""
        return {}


def blank(rows: int, width: int) -> Arrays:
    """Make input_ids and targets of rows without texts."""
    return {"input_ids": np.zeros((rows, width), np.int64), TARGETS: np.full((rows, width), IGNORED, np.int64)}


def write(arrays: Arrays, text: TokenizedText, row: int, start: int) -> None:
    """Put a text's inputs and targets into a row."""
    stop = start + len(text) - 1
    arrays["input_ids"][row, start:stop] = text.ids[:-1]
    arrays[TARGETS][row, start:stop] = np.where(text.learned[1:], text.ids[1:], IGNORED)


def count_learned(texts: Sequence[TokenizedText], rows: Sequence[Sequence[int]]) -> Arrays:
    """Count how many targets of each row are learned, where not all are. rows: the texts of each."""
    if all(text.count == len(text) - 1 for text in texts):
        return {}
    return {LEARNED: np.array([sum(texts[member].count for member in members) for members in rows])}


def split_answer(text: TokenizedText) -> tuple[Array, Array]:
    """Split a text into the prompt and the first answer, or where all is learned into the opening and the rest."""
    learned = text.learned[1:].nonzero()[0] + 1
    first = int(learned[0])
    if first == 1:
        first = min(OPENING, len(text) // 2) or 1
    unlearned = np.flatnonzero(~text.learned[first:])
    stop = first + int(unlearned[0]) if len(unlearned) else len(text)
    return text.ids[:first], text.ids[first:stop]


def answer_prompts(
    task: TextGeneration, module: nn.Module, samples: Sequence[TokenizedText], device: torch.device
) -> list[dict[str, str]]:
    """Generate an answer to the prompt of each text, as `Objective.answer` returns them."""
    prompts, references = zip(*map(split_answer, samples), strict=True)
    tokenizer = task.tokenizer
    special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    stops = special & {int(index) for reference in references for index in reference}
    if task.end_id is not None:
        stops.add(task.end_id)
    answers = generate_greedily(module, prompts, device, stops=stops, longest=task.current_max_length)
    rows = zip(prompts, answers, references, strict=True)
    texts = [[tokenizer.decode(ids.tolist(), skip_special_tokens=False) for ids in row] for row in rows]
    return [dict(zip(("given", "answer", "wanted"), row, strict=True)) for row in texts]


def generate_greedily(
    module: nn.Module,
    prompts: Sequence[Array],
    device: torch.device,
    *,
    stops: Collection[int],
    longest: int,
) -> list[Array]:
    """Append the likeliest next token again and again, until one of `stops`, to each prompt [tokens] int64; the stop is
    not part of an answer.

    module: a `LanguageModel`, which runs without a cache, as in training. longest: tokens of a prompt with its answer.
    """
    model: Any = module
    texts = [list(map(int, prompt)) for prompt in prompts]
    active = set(range(len(texts)))
    for _ in range(LONGEST):
        active -= {row for row in active if len(texts[row]) >= longest}
        if not active:
            break
        rows = sorted(active)
        width = max(len(texts[row]) for row in rows)
        ids, mask = (torch.zeros((len(rows), width), dtype=torch.int64) for _ in range(2))
        for place, row in enumerate(rows):
            ids[place, : len(texts[row])] = torch.tensor(texts[row])
            mask[place, : len(texts[row])] = 1
        tokens = model.choose_next(ids.to(device), mask.to(device)).tolist()
        for row, token in zip(rows, tokens, strict=True):
            if token in stops:
                active.discard(row)
            else:
                texts[row].append(token)
    return [np.array(text[len(prompt) :], np.int64) for text, prompt in zip(texts, prompts, strict=True)]
