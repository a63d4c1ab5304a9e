"""How far neighbouring blocks of a transformer turn the hidden states, in one pass over the calibration samples."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from compress.statistics.layer_inputs import find_tokens, forward_batches, select_tokens
from compress.transformer.blockwise import HIDDEN, get_hidden
from laconic.data.dataset import Dataset
from laconic.errors import SourceError
from laconic.models.anatomy import anatomy
from laconic.models.hooks import forward_hooks
from laconic.models.signature import call
from laconic.tasks.task import Task


def find_redundant_run(module: nn.Module, task: Task, dataset: Dataset, length: int) -> int:
    """Return the index of the first of `length` neighbouring blocks that turn the hidden states least: by the angle
    between the input of the first and the output of the last, the mean over tokens (Gromov et al., The Unreasonable
    Ineffectiveness of the Deeper Layers, 2024, arXiv:2403.17887). Raises SourceError as `measure_angles` does."""
    return int(measure_angles(module, task, dataset, length).argmin()) if length else 0


@torch.no_grad()
def measure_angles(module: nn.Module, task: Task, dataset: Dataset, length: int) -> Tensor:
    """Measure the angle by which each run of `length` neighbouring blocks turns the hidden states, as a share of a half
    turn, the mean over tokens: [blocks - length + 1] float64, by the run's first block.

    Raises SourceError where the hidden states change their shape on the way.
    """
    blocks = anatomy(module).blocks
    states: list[Tensor] = []

    def record_input(path: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states.append(args[0] if args else kwargs[HIDDEN])

    def record_output(path: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        states.append(get_hidden(out))

    sums, count = torch.zeros(len(blocks) - length + 1, dtype=torch.float64), 0
    with forward_hooks(module, blocks, before=record_input), forward_hooks(module, blocks[-1:], after=record_output):
        for batch in forward_batches(task, dataset):
            states.clear()
            call(module, batch)
            if len(states) != len(blocks) + 1 or len({state.shape for state in states}) > 1:
                raise SourceError(
                    "criterion: angle compares the hidden states before and after blocks, and here their shape changes "
                    "between blocks. Use criterion: fidelity"
                )
            tokens = [select_tokens(state, find_tokens(batch)) for state in states]
            cosines = torch.stack(
                [cosine_similarity(tokens[at], tokens[at + length], dim=-1) for at in range(len(sums))]
            )
            sums += torch.acos(cosines.double().clamp(-1, 1)).sum(dim=1) / math.pi
            count += cosines.shape[1]
    return sums / max(count, 1)
