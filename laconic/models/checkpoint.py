"""Checkpoints: a trained module with its weights, signature, task and history.

On disk it is a folder: model.safetensors, model.json, and the files of its task. Never a pickle.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from laconic import registry
from laconic.artifacts.ledger import JSON
from laconic.artifacts.manifest import REPORT
from laconic.artifacts.record import Record
from laconic.cache import open_scratch_folder
from laconic.config import explain
from laconic.errors import CorruptArtifact, LaconicError, SourceError, UntrustedSource, UsageError, did_you_mean
from laconic.files import replace_folder
from laconic.hashing import hash_of, seal, unseal
from laconic.models import builder as builders
from laconic.models import timm_folder, wrappers
from laconic.models.language_model import fit_cache
from laconic.models.meta_parameters import is_complete, keep_parameters_on_meta
from laconic.models.signature import probe_module
from laconic.models.weights import fill, fingerprint, read_safetensors, scan_weights, tie, write_weights
from laconic.runtimes.adapter_config import is_adapter
from laconic.tasks.task import Task, open_task
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
        raise SourceError(f"{folder} comes from a source of kind {kind!r}. {did_you_mean(str(kind), BUILDABLE)}")
    if card.task not in registry.TASKS:
        raise SourceError(f"{folder}: {registry.describe_unknown('task', card.task)}. Save the checkpoint again")
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


WEIGHTS = "model.safetensors"
BUILD = {"huggingface": wrappers.build, "timm": timm_folder.build, "builder": builders.build}
"""Functions that build a module without its weights, by the kind of its source: BUILDABLE."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A module in evaluation mode, float32, without gradients, that takes the inputs by name in their order.

    source: how to build the module, JSON-ready. history: a record of each step since. licence: as the source states it.
    weights: a digest that tells the module's weights from all others. key: digest of source, history, task, signature
    and weights. size: bytes of the weight files of the source.
    """

    module: nn.Module
    task: Task
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    source: dict[str, Any]
    history: tuple[Record, ...]
    licence: str | None
    weights: str
    key: str
    size: int

    @classmethod
    def of(
        cls,
        module: nn.Module,
        task: Task,
        *,
        outputs: tuple[TensorSpec, ...],
        source: dict[str, Any],
        size: int,
        history: tuple[Record, ...] = (),
        licence: str | None = None,
        weights: str | None = None,
    ) -> "Checkpoint":
        """Prepare the module in place (evaluation mode, float32, no gradients) and compute the key.

        weights: a digest that tells them from all others; by default that of the module's values.
        """
        module = prepare(module)
        signature = [spec.model_dump(mode="json") for spec in (*task.inputs, *outputs)]
        assets = {name: hash_of(content.decode()) for name, content in task.assets().items()}
        steps = [record.key for record in history]
        weights = weights or fingerprint(module)
        key = hash_of(source, steps, task.name, signature, assets, weights)
        return cls(module, task, task.inputs, outputs, source, history, licence, weights, key, size)

    def derive(self, module: nn.Module, task: Task, *, weights: str | None = None, **changes: Any) -> "Checkpoint":
        """Return a checkpoint of a module with the outputs, source, size, history and licence of this one, except for
        `changes`."""
        kept = {name: getattr(self, name) for name in ("outputs", "source", "size", "history", "licence")}
        return Checkpoint.of(module, task, weights=weights, **kept | changes)

    def after(self, record: Record, module: nn.Module) -> "Checkpoint":
        """Return the checkpoint after a stage; outputs keep their names, and may have other shapes."""
        module = prepare(module)
        task = fit_cache(self.task, module)
        names = tuple(spec.name for spec in self.outputs)
        outputs = probe_module(module, task.inputs, names, task.sample_inputs)
        return self.derive(module, task, outputs=outputs, history=(*self.history, record))

    def with_task(self, task: Task) -> "Checkpoint":
        """Return the checkpoint with another task of the same outputs."""
        return self.derive(self.module, task, weights=self.weights)

    def save(self, folder: Path) -> None:
        """Write the folder, whole or not at all, in place of an earlier checkpoint.

        Raises UsageError where something else is in the way, SourceError for a module that cannot be built again.
        """
        self.check_buildable()
        check_free(folder)
        with open_scratch_folder(folder) as scratch:
            made = scratch / folder.name
            made.mkdir()
            for name, content in self.task.assets().items():
                (made / name).write_bytes(content)
            tied = write_weights(self.module, made / WEIGHTS)
            card = self._card(tied, scan_weights([made / WEIGHTS]).digest)
            (made / CARD).write_bytes(seal(card.model_dump(mode="json")))
            replace_folder(made, folder)

    def check_buildable(self) -> None:
        """Raise SourceError unless the module can be rebuilt from its source, which saving requires."""
        if self.source["kind"] not in BUILDABLE:
            raise SourceError(
                f"a model from a {self.source['kind']} cannot be saved, since nothing says how to build it again. "
                f"Give its weights with a --builder"
            )

    def _card(self, tied: Mapping[str, str], stored: str) -> Card:
        names = ("inputs", "outputs", "source", "history", "licence", "weights", "key", "size")
        same = {name: getattr(self, name) for name in names}
        return Card(task=self.task.name, tied=dict(tied), stored=stored, **same)

    @classmethod
    def load(cls, folder: Path, *, trust: bool = False) -> "Checkpoint":
        """Open what `save` wrote, bit for bit the same.

        Raises SourceError where a file is not as it was written, UntrustedSource where opening it calls a function
        that it names (a builder, a stage of somebody's own), or runs code that it brings, and nobody trusts it.
        """
        card = read_card(folder, trust=trust)
        module = open_module(card, folder, trust=trust)
        try:
            task = open_task(card.task, folder, card.inputs)
        except CorruptArtifact as error:
            raise SourceError(str(error)) from error
        loaded = cls.of(
            module,
            task,
            outputs=card.outputs,
            source=card.source,
            size=card.size,
            history=card.history,
            licence=card.licence,
            weights=card.weights,
        )
        if card.stored not in (None, scan_weights([folder / WEIGHTS]).digest):
            raise SourceError(f"{folder} is not the checkpoint that was saved: its weights were changed. Copy it again")
        if loaded.key != card.key:
            raise SourceError(
                f"{folder} is not the checkpoint that was saved: its files were changed, or it is from a version of "
                f"Laconic whose task {card.task} is not the same. Copy it again, or save it with this version"
            )
        return loaded


def open_module(card: Card, folder: Path, *, trust: bool) -> nn.Module:
    """Return the module of a saved checkpoint with weights that are mapped from its file, so that processes share them
    and nothing is copied; copied into memory where a builder, or a model that computes with its weights while it is
    built, needs them there.

    trust: as of `rebuild_from_card`. Raises SourceError.
    """
    tensors = read_safetensors(folder / WEIGHTS)
    if card.source["kind"] != "builder":
        with suppress(SourceError):  # it is raised again below
            with keep_parameters_on_meta():
                module = rebuild_from_card(card, folder, trust=trust)
            fill(module, tensors, folder / WEIGHTS, assign=True)
            tie(module, card.tied)
            if is_complete(module):
                return module
    module = rebuild_from_card(card, folder, trust=trust)
    fill(module, tensors, folder / WEIGHTS)
    tie(module, card.tied)
    return module


def rebuild(source: Mapping[str, Any], history: tuple[Record, ...]) -> nn.Module:
    """Return the module without its weights: built from the source, then each structural change replayed."""
    module = prepare(BUILD[source["kind"]](source))
    for record in history:
        stage = registry.resolve("stage", record.stage)
        if hasattr(stage, "rebuild"):  # what only trains changes no structure
            stage.rebuild(module, record)
    return module


def rebuild_from_card(card: Card, folder: Path, *, trust: bool) -> nn.Module:
    """Return the module of a saved checkpoint without its weights.

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


def check_free(destination: Path) -> None:
    """Raise UsageError where a checkpoint could not be written."""
    taken = destination.exists() and not destination.is_dir()
    known = (destination / CARD).is_file() or is_adapter(destination) or is_quantized(destination)
    if taken or (destination.is_dir() and any(destination.iterdir()) and not known):
        raise UsageError(
            f"{destination} exists and is not a checkpoint: it will not be overwritten. Choose another --output"
        )
    if not destination.name:
        raise UsageError(f"{destination} is no folder that could be written. Choose another --output")
    for parent in destination.parents:
        if parent.exists() and not parent.is_dir():
            raise UsageError(f"{parent} is a file, so {destination} cannot be made in it. Choose another --output")


def is_quantized(folder: Path) -> bool:
    """Return whether a folder is a quantized model as other programs read it, written with its report."""
    return all((folder / name).is_file() for name in (timm_folder.CONFIG, JSON, REPORT))
