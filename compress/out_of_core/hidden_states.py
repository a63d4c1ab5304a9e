"""Hidden states of texts between two layers of a model, in a file."""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class HiddenStates:
    """The hidden states of several texts, one after another in a file: [tokens, width] float32 each.

    Read and written a text at a time, and not mapped: mapped pages would count as memory of the process.
    """

    def __init__(self, path: Path, lengths: list[int], width: int) -> None:
        """path: of the file, which may be absent. lengths: tokens of each text. width: of a token's hidden state."""
        self.path, self.lengths, self.width = path, lengths, width

    def write(self, states: Iterable[Tensor]) -> None:
        """Write the states of all texts, in order, [1, tokens, width] each. The file appears when it is whole."""
        partial = self.path.with_suffix(".partial")
        with partial.open("wb") as file:
            for state in states:
                file.write(state.contiguous().numpy().tobytes())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.path)

    def read(self, index: int) -> Tensor:
        """Read the states of a text, [1, tokens, width] float32."""
        tokens = self.lengths[index]
        values = np.fromfile(
            self.path, np.float32, tokens * self.width, offset=4 * self.width * sum(self.lengths[:index])
        )
        return torch.from_numpy(values).reshape(1, tokens, self.width)
