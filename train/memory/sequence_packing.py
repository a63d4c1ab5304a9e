"""Sequence packing: several texts in a row of the batch, in place of padding."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from laconic.arrays import Arrays
from laconic.errors import RecipeError
from train.objectives.next_token import (
    FILLED,
    NextToken,
    TextLayout,
    TokenizedText,
    blank,
    count_learned,
    write,
)
from train.step.step_parts import StepParts
from train.step.technique import Technique


class SequencePacking(Technique):
    """Packs the texts of a batch into as few rows as hold them. Positions count from 0 for each text, and attention
    does not cross from one text to another (Krell et al., arXiv 2107.02027). The targets, and so the mean loss, are
    those of the batch; dropout draws other numbers.

    length: tokens of a row, and more where a text is longer; by default those of the batch's longest text.
    """

    slot = "batch"
    exact = True
    excludes: ClassVar[Mapping[str, str]] = {"context": "its ranks attend to all earlier positions of a row"}

    length: int | None = Field(default=None, ge=1)

    @property
    def redraws_dropout(self) -> bool:
        return True

    def apply(self, parts: StepParts) -> None:
        objective, model = parts.objective, getattr(parts.module, "model", parts.module)
        if not isinstance(objective, NextToken):
            raise RecipeError(
                f"sequence-packing puts several texts into a row, for language models that learn the next token; the "
                f"objective here, {type(objective).__name__}, takes one text per row. Remove sequence-packing"
            )
        known = inspect.signature(getattr(model, "base_model", model).forward).parameters
        if "position_ids" not in known:
            raise RecipeError(
                f"sequence-packing gives the model each token's position, and {type(model).__name__} takes none: its "
                f"texts would attend to one another. Remove sequence-packing"
            )
        plain, objective.layout = objective.layout, PackedLayout(self.length)
        parts.on_restore(lambda: setattr(objective, "layout", plain))


class PackedLayout(TextLayout):
    """Packs as many texts into a row as fit."""

    def __init__(self, length: int | None = None) -> None:
        self.length = length

    def rows(self, texts: Sequence[TokenizedText], round_up: Callable[[int], int]) -> Arrays:
        sizes = [len(text) - 1 for text in texts]
        width = max(self.length or 0, round_up(max(sizes)))
        packed = pack_first_fit(sizes, width)
        arrays: dict[str, Any] = blank(len(packed), width)
        # The rest of a row is one more text, whose targets are ignored.
        positions = np.zeros((len(packed), width), np.int64)
        for row, members in enumerate(packed):
            start = 0
            for member in members:
                write(arrays, texts[member], row, start)
                positions[row, start : start + sizes[member]] = np.arange(sizes[member])
                start += sizes[member]
            positions[row, start:] = np.arange(width - start)
        filled = np.array([sum(sizes[member] for member in members) for members in packed])
        counts = {} if (filled == width).all() else {FILLED: filled}
        return arrays | {"position_ids": positions} | counts | count_learned(texts, packed)

    def make_example(self, rows: int, width: int) -> Arrays:
        # Two texts to a row: code that looks for several texts finds them, and takes the same path as in training.
        half = np.arange(width) % max(1, -(-width // 2))
        return {"position_ids": np.tile(half, (rows, 1))}


def pack_first_fit(sizes: Sequence[int], width: int) -> list[list[int]]:
    """Distribute the indices of the sizes over rows by first-fit decreasing: the longest first, each into the first row
    with room for it.

    It takes at most 11/9 of the fewest rows, and one more (Johnson, 1973).
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        place = next((row for row, left in enumerate(room) if left >= sizes[index]), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(width)
        rows[place].append(index)
        room[place] -= sizes[index]
    return rows
