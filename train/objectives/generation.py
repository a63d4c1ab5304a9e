"""Answers that a language model generates while it is trained, to be read beside those that it learns."""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import nn

from laconic.arrays import Array
from train.objectives.tokenized_text import TokenizedText

LONGEST = 64
"""Tokens of an answer, at most."""
OPENING = 8
"""Tokens of a document that are given, at most."""


def split_answer(text: TokenizedText) -> tuple[Array, Array]:
    """Split a text into the prompt and the first answer: where all tokens are learned, the opening of a document and
    its rest."""
    learned = text.learned[1:].nonzero()[0] + 1
    first = int(learned[0])
    if first == 1:
        first = min(OPENING, len(text) // 2) or 1
    unlearned = np.flatnonzero(~text.learned[first:])
    stop = first + int(unlearned[0]) if len(unlearned) else len(text)
    return text.ids[:first], text.ids[first:stop]


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

    module: from input_ids and attention_mask, [rows, tokens] int64, to the next token's logits [rows, vocab]. Without a
    cache of keys and values, so that the model runs as in training. longest: tokens of a prompt with its answer.
    """
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
        found = module(ids.to(device), mask.to(device)).argmax(dim=-1).tolist()
        for row, token in zip(rows, found, strict=True):
            if token in stops:
                active.discard(row)
            else:
                texts[row].append(token)
    return [np.array(text[len(prompt) :], np.int64) for text, prompt in zip(texts, prompts, strict=True)]
