"""The card of a saved checkpoint: what its weights belong to, and of what the module is built again."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from laconic import registry
from laconic.artifacts.record import Record
from laconic.config import explain
from laconic.errors import CorruptArtifact, SourceError, UntrustedSource
from laconic.hashing import unseal
from laconic.tensor import TensorSpec

CARD = "model.json"
FORMAT: Literal[1] = 1
BUILDABLE = ("builder", "huggingface", "timm")
"""The kinds of sources that say how their module is built again."""


class Card(BaseModel):
    """The content of model.json. tied: names of weights that are stored under another name. weights: the digest that
    the key was computed from, and stored: that of the tensors in the file; None in a card of an earlier version, whose
    key has the digest of the module's values."""

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
    weights: str | None = None
    stored: str | None = None


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
    if not isinstance(kind, str) or kind not in BUILDABLE:
        raise SourceError(
            f"{folder} comes from a source of kind {kind!r}. {registry.did_you_mean(str(kind), BUILDABLE)}"
        )
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


def prepare(module: nn.Module) -> nn.Module:
    """Return the same module in evaluation mode, float32, without gradients."""
    return module.eval().float().requires_grad_(False)
