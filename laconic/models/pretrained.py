"""Models of transformers as they are built and wrapped, without the weights of a folder."""

import inspect
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

if TYPE_CHECKING:
    from laconic.tasks.generation_settings import GenerationSettings
    from laconic.tasks.task import Task


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and reports of transformers in the body: what matters in them is raised as an error."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


CLOSE = 1e-4
"""The largest difference between two computations of the same values, relative to the largest value."""
ENCODER = "AutoModel"
"""The Auto class of a bare encoder, without a head."""


def is_close(actual: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are equal up to the rounding of their sums."""
    return torch.allclose(actual, expected, atol=CLOSE * float(expected.abs().max()), rtol=0)


def class_config(labels: Sequence[str], problem_type: str | None) -> dict[str, Any]:
    """Return the entries of a config.json about the classes."""
    return {
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
        **({"problem_type": problem_type} if problem_type else {}),
    }


def is_head_weight(model: Any, name: str) -> bool:
    """Return whether a weight belongs to the head, or to the pooler before it, rather than to the encoder."""
    inside = f"{model.base_model_prefix}."
    return not name.startswith(inside) or name.startswith(f"{inside}pooler.")


def reset_head(model: Any, count: int) -> None:
    """Initialize the output layer of a classifier with random weights, even where the old one has the same size."""
    deviation = getattr(model.config, "initializer_range", None) or 0.02
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer.out_features == count and is_head_weight(model, f"{name}."):
            nn.init.normal_(layer.weight, std=deviation)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def model_class(config: Any, auto_class: str) -> Any:
    """Return the class of transformers that builds a model: the Auto class, but for the encoder of an encoder and
    decoder."""
    encoders = transformers.AutoModelForTextEncoding
    if auto_class == ENCODER and type(config) in encoders._model_mapping:
        return encoders
    return getattr(transformers, auto_class)


def model_options(config: Any, auto_class: str, *, pooler: bool = False) -> dict[str, Any]:
    """Return options that build an encoder without its pooler: unused, and random where the source has no weights for
    it.

    pooler: whether it is wanted.
    """
    if auto_class != ENCODER or pooler:
        return {}
    kind = transformers.AutoModel._model_mapping.get(type(config), None)
    known = kind is not None and "add_pooling_layer" in inspect.signature(kind.__init__).parameters
    return {"add_pooling_layer": False} if known else {}


class WrappedModel(nn.Module):
    """A module around a model of another library, with plain tensors in and out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class WritingModel(nn.Module):
    """A module that also writes texts, token by token."""

    @abstractmethod
    def generate(self, source: Mapping[str, Tensor], generation: "GenerationSettings") -> Tensor:
        """Return the greedy answers of transformers, without the tokens that they follow: [batch, tokens] int64, padded
        on the right. source: what a server takes, by name."""


@dataclass(frozen=True)
class Loaded:
    """A module, its task, and how to build the same module again. output: the name of the module's output. size: bytes
    of the weights in files. files: those that the weights came from."""

    module: nn.Module
    task: "Task"
    output: str
    source: dict[str, Any]
    size: int
    files: tuple[Path, ...]
