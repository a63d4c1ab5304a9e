"""Which layer of a student learns from which of its teacher."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from compress.transformer.anatomy import anatomy
from laconic.artifacts.record import Record
from laconic.errors import SourceError
from laconic.models.repeated_layers import find_layer_lists

BLOCKS = "blocks"
"""In the structure of a record: the numbers of the layers that stayed."""


@dataclass(frozen=True)
class Pair:
    """A layer of the student by name, and those of the teacher that it stands for: the first and the last of them."""

    student: str
    first: str
    last: str


def pairs(student: nn.Module, teacher: nn.Module, history: Sequence[Record] = ()) -> tuple[Pair, ...]:
    """The repeated layers of both, in order; none where the teacher has none, or the student's are elsewhere.

    history: of the student, since it was the teacher. It says which layers were removed; else those that are left are
    taken to be evenly spread. A layer stands for those behind it that are gone as well, so that what follows finds the
    input that it had (with even spacing, the mapping of TinyBERT: Jiao et al., 2020, arXiv:1909.10351).
    """
    found: list[Pair] = []
    for name in lists(teacher):
        try:
            left = [child for child, _ in student.get_submodule(name).named_children()]
        except AttributeError:
            return ()
        whole = [child for child, _ in teacher.get_submodule(name).named_children()]
        ends = last(kept(history, len(whole)), len(left), len(whole))
        starts = [0, *(end + 1 for end in ends[:-1])]
        found += [
            Pair(f"{name}.{own}", f"{name}.{whole[start]}", f"{name}.{whole[end]}")
            for own, start, end in zip(left, starts, ends, strict=True)
        ]
    return tuple(found)


def lists(module: nn.Module) -> list[str]:
    """The names of a model's lists of repeated layers."""
    try:
        return [anatomy(module).stack]
    except SourceError:
        names = {id(each): name for name, each in module.named_modules()}
        return [names[id(stack)] for stack in find_layer_lists(module)]


def kept(history: Sequence[Record], count: int) -> list[int]:
    """Which of `count` layers are left, by their number in the teacher."""
    left = list(range(count))
    for record in history:
        stayed = record.structure.get(BLOCKS, range(len(left)))
        left = [left[index] for index in stayed if index < len(left)]
    return left


def last(left: Sequence[int], own: int, whole: int) -> list[int]:
    """Of each of a student's layers, the last layer of the teacher that it stands for."""
    if len(left) != own:
        return [-(-(index + 1) * whole // own) - 1 for index in range(own)]
    return [*(after - 1 for after in left[1:]), whole - 1]
