"""The layer mapping of distillation: which layer of a student learns from which layer of its teacher."""

from collections.abc import Sequence

from torch import nn

from compress.distill.distillation_loss import LayerPair
from compress.transformer.anatomy import anatomy
from compress.transformer.refit_blocks import find_counterparts
from laconic.artifacts.record import Record
from laconic.errors import SourceError
from laconic.models.repeated_layers import find_layer_lists


def pair_layers(student: nn.Module, teacher: nn.Module, history: Sequence[Record] = ()) -> tuple[LayerPair, ...]:
    """The pairs of repeated layers, in order; none if the teacher has none, or the student's are elsewhere.

    history: of the student, since it equalled the teacher. It tells which layers were removed; otherwise the remaining
    ones are assumed to be evenly spaced. A layer also replaces the removed layers behind it, so that the next layer
    gets the input that it had (with even spacing, the mapping of TinyBERT: Jiao et al., 2020, arXiv:1909.10351).
    """
    found: list[LayerPair] = []
    for name in find_stacks(teacher):
        try:
            left = [child for child, _ in student.get_submodule(name).named_children()]
        except AttributeError:
            return ()
        whole = [child for child, _ in teacher.get_submodule(name).named_children()]
        ends = last_replaced(find_counterparts(history, len(whole)), len(left), len(whole))
        starts = [0, *(end + 1 for end in ends[:-1])]
        found += [
            LayerPair(f"{name}.{own}", f"{name}.{whole[start]}", f"{name}.{whole[end]}")
            for own, start, end in zip(left, starts, ends, strict=True)
        ]
    return tuple(found)


def find_stacks(module: nn.Module) -> list[str]:
    """The names of a model's lists of repeated layers."""
    try:
        return list(anatomy(module).stacks)
    except SourceError:
        names = {id(each): name for name, each in module.named_modules()}
        return [names[id(stack)] for stack in find_layer_lists(module)]


def last_replaced(kept: Sequence[int], own: int, whole: int) -> list[int]:
    """For each of a student's `own` layers, the last of the teacher's `whole` layers that it replaces.

    kept: the indices that the student's layers had in the teacher, if they are known.
    """
    if len(kept) != own:
        return [-(-(index + 1) * whole // own) - 1 for index in range(own)]
    return [*(after - 1 for after in kept[1:]), whole - 1]
