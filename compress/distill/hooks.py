"""What a model shows while it answers: its outputs, and those of the layers that are asked for by name."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from laconic.layerwise.layer_stack import hidden_of
from laconic.models.language_model import LanguageModel
from laconic.models.signature import call
from laconic.training.step.objective import TARGETS, Batch

READ = ("input_ids", "attention_mask", "position_ids")
"""What a language model reads of a batch."""
HIDDEN = "hidden"


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass through a module.

    answers: its outputs by name; of a language model the hidden states of all tokens, [rows, places, width], as
    `hidden`. outputs, calls: of the layers that were watched, by name: the first tensor that each gave, and what it was
    called with.
    """

    module: nn.Module
    answers: Mapping[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)

    @property
    def first(self) -> Tensor:
        """The output that counts."""
        return next(iter(self.answers.values()))


def watch(module: nn.Module, batch: Batch, names: Collection[str]) -> Pass:
    """Run a module on a batch, and keep what the layers of these names give."""
    seen = Pass(module)
    with hooked(module, names, seen):
        answers = answer(module, batch)
    return Pass(module, answers, seen.outputs, seen.calls)


def answer(module: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The module's outputs for the batch's inputs."""
    if isinstance(module, LanguageModel):
        return {HIDDEN: module.hidden(**{name: batch[name] for name in READ if name in batch})}
    return call(module, {name: tensor for name, tensor in batch.items() if name != TARGETS})


@contextmanager
def hooked(module: nn.Module, names: Collection[str], seen: Pass) -> Iterator[None]:
    """Layers tell what they give in the body; not in the backward pass, where some are computed again."""
    handles = [
        module.get_submodule(name).register_forward_hook(partial(note, seen, name), with_kwargs=True)
        for name in sorted(names)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def note(seen: Pass, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Keep what a layer was called with, and what it gave."""
    seen.calls[name], seen.outputs[name] = (args, kwargs), hidden_of(output)
