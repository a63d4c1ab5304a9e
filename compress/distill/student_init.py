"""Weights that a student takes over from a larger model."""

import copy
from collections.abc import Sequence

import torch
from torch import nn

from compress.statistics.gram import matrix
from compress.transformer.anatomy import Site, anatomy
from compress.transformer.surgery import cut, keep_blocks


@torch.no_grad()
def inherit(student: nn.Module, whole: nn.Module, stays: Sequence[int]) -> None:
    """Copy weights into a student of the same family, as far as they go: of the layers that stay, those feed-forward
    units whose weights are largest, and the first of anything else. What is larger than in the original stays as it
    was."""
    left = copy.deepcopy(whole)
    keep_blocks(left, stays)
    for own, theirs in zip(anatomy(student).of("ffn"), anatomy(left).of("ffn"), strict=True):
        if own.units < theirs.units:
            cut(left, theirs, largest(left, theirs, own.units))
    found = left.state_dict()
    for name, value in student.state_dict().items():
        if name in found and found[name].ndim == value.ndim:
            common = tuple(slice(min(sizes)) for sizes in zip(value.shape, found[name].shape, strict=True))
            value[common] = found[name][common]


def largest(module: nn.Module, site: Site, count: int) -> list[int]:
    """The feed-forward units with the largest product of what goes in and what comes out, each as a norm."""
    score = matrix(module.get_submodule(site.consumer)).norm(dim=0)
    for source in site.sources:
        score = score * matrix(module.get_submodule(source.layer)).norm(dim=1)
    return sorted(score.argsort(descending=True, stable=True)[:count].tolist())


def spaced(count: int, whole: int) -> list[int]:
    """So many numbers from 0 to before `whole`, evenly spaced, the first and the last among them."""
    return [0] if count == 1 else [round(index * (whole - 1) / (count - 1)) for index in range(count)]
