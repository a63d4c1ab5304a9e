"""A recorded forward pass of a model: its outputs, and the calls and outputs of layers that are asked for by name."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from laconic.models.hooks import forward_hooks
from laconic.models.language_model import LanguageModel
from laconic.models.signature import call
from train.layerwise.layer_stack import hidden_of
from train.step.objective import TARGETS, Batch

LANGUAGE_MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids")
"""The tensors of a batch that a language model reads."""
HIDDEN = "hidden"


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """One forward pass of a module.

    answers: its outputs by name; of a language model the hidden states of all tokens, [rows, tokens, width], as
    `hidden`. outputs, calls: of the recorded layers, by name: the first tensor that each returned, and its arguments.
    """

    module: nn.Module
    answers: Mapping[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)

    @property
    def first(self) -> Tensor:
        """The first output."""
        return next(iter(self.answers.values()))


def record_forward(module: nn.Module, batch: Batch, names: Collection[str]) -> ForwardPass:
    """Run a module on a batch, and record the layers of these names.

    The hooks are gone in the backward pass, where activation checkpointing runs some layers again.
    """
    seen = ForwardPass(module)

    def record(name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen.calls[name], seen.outputs[name] = (args, kwargs), hidden_of(output)

    with forward_hooks(module, sorted(names), after=record):
        answers = run_model(module, batch)
    return ForwardPass(module, answers, seen.outputs, seen.calls)


def run_model(module: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The module's outputs for the batch's inputs."""
    if isinstance(module, LanguageModel):
        return {HIDDEN: module.hidden(**{name: batch[name] for name in LANGUAGE_MODEL_INPUTS if name in batch})}
    return call(module, {name: tensor for name, tensor in batch.items() if name != TARGETS})
