"""Small unsigned integers in words of 32 bits."""

import torch
from torch import Tensor

WORD = 32


def pack(integers: Tensor, bits: int) -> Tensor:
    """Pack unsigned integers [rows, columns] along their columns, the first in the lowest bits: [rows, words] int32."""
    count = WORD // bits
    padded = torch.nn.functional.pad(integers.to(torch.int64), (0, -integers.shape[1] % count))
    shifts = torch.arange(count) * bits
    words = (padded.reshape(len(padded), -1, count) << shifts).sum(dim=-1)
    return torch.where(words >= 1 << (WORD - 1), words - (1 << WORD), words).to(torch.int32)


def unpack(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unpack words [rows, words] to unsigned integers, [rows, columns] int32.

    order: of the integers in a word, the place where each has its bits, counted from the lowest; by default one after
    the other.
    """
    places = torch.tensor(order or range(WORD // bits), dtype=torch.int32)
    return ((words[..., None] >> places * bits) & ((1 << bits) - 1)).reshape(len(words), -1)
