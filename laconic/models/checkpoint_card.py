"""The card of a saved checkpoint: what its weights belong to, and how the module is built again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from laconic import registry
from laconic.artifacts.record import Record
from laconic.config import explain
from laconic.errors import CorruptArtifact, LaconicError, SourceError, UntrustedSource
from laconic.hashing import unseal
from laconic.models import builder as builders
from laconic.models import huggingface
from laconic.tensor import TensorSpec

CARD = "model.json"
FORMAT: Literal[1] = 1


class Card(BaseModel):
    """The content of model.json. tied: names of weights that are stored under another name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = FORMAT
    task: str
    inputs: tuple[TensorSpec, ...] = Field(min_length=1)
    outputs: tuple[TensorSpec, ...] = Field(min_length=1)
    source: dict[str, Any]
    history: tuple[Record, ...]
    licence: str | None
    key: str
    size: int
    tied: dict[str, str]


def read_card(folder: Path, *, trust: bool) -> Card:
    """Read the card of a saved checkpoint.

    Raises SourceError for one that is damaged or of another format, UntrustedSource where it names code that did not
    come with Laconic, unless it is trusted.
    """
    try:
        content = unseal(folder / CARD)
    except CorruptArtifact as error:
        raise SourceError(str(error)) from error
    if content.get("format") != FORMAT:
        raise SourceError(f"{folder} is a checkpoint of format {content.get('format')!r}; expected {FORMAT}")
    try:
        card = Card.model_validate(content)
    except ValidationError as error:
        raise SourceError(explain(error, f"{folder / CARD} does not fit its format")) from None
    kind, code = card.source.get("kind"), card.source.get("code")
    if not isinstance(kind, str) or kind not in BUILD:
        raise SourceError(f"{folder} comes from a source of kind {kind!r}. {registry.did_you_mean(str(kind), BUILD)}")
    if card.task not in registry.TASKS:
        raise SourceError(f"{folder} is for task {card.task!r}. {registry.did_you_mean(card.task, registry.TASKS)}")
    named = [str(card.source.get("builder"))] if kind == "builder" else []
    named += [str(code)] if code and not isinstance(code, dict) else sorted(code or ())
    named += [record.stage for record in card.history if record.stage not in registry.STAGES]
    if named and not trust:
        raise UntrustedSource(
            f"opening {folder} would execute code that it names ({', '.join(named)}). Say --trust if it is yours"
        )
    return card


BUILD = {"huggingface": huggingface.build, "builder": builders.build}
"""Functions that build a module without its weights, by the kind of its source."""


def prepare(module: nn.Module) -> nn.Module:
    """The same module in evaluation mode, float32, without gradients."""
    return module.eval().float().requires_grad_(False)


def rebuild(source: Mapping[str, Any], history: tuple[Record, ...]) -> nn.Module:
    """The module without its weights: built from the source, then each structural change replayed."""
    module = prepare(BUILD[source["kind"]](source))
    for record in history:
        stage = registry.resolve("stage", record.stage)
        if hasattr(stage, "rebuild"):  # what only trains changes no structure
            stage.rebuild(module, record)
    return module


def rebuild_from_card(card: Card, folder: Path, *, trust: bool) -> nn.Module:
    """The module of a saved checkpoint without its weights.

    trust: whether stages may be given by their address. Raises SourceError for a source or a change that does not fit.
    """
    try:
        with registry.trust_addresses(trust):
            return rebuild(card.source, card.history)
    except LaconicError:
        raise
    except Exception as error:  # whatever a crafted config or structure makes of a model
        raise SourceError(
            f"{folder / CARD} does not describe a model: {type(error).__name__}, {' '.join(str(error).split())}. "
            f"Save the checkpoint again"
        ) from error
