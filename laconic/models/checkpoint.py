"""Checkpoints: a trained module with its weights, signature, task and history.

On disk it is a folder: model.safetensors, model.json, and the files of its task. Never a pickle.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from laconic import registry
from laconic.arrays import Arrays
from laconic.artifacts.manifest import MANIFEST
from laconic.artifacts.record import Record
from laconic.cache import open_scratch_folder
from laconic.errors import CorruptArtifact, LaconicError, SourceError, UsageError
from laconic.files import replace_folder
from laconic.hashing import hash_of, seal
from laconic.models import builder as builders
from laconic.models import huggingface, timm_folder
from laconic.models.adapter import is_adapter, read_adapter
from laconic.models.checkpoint_card import BUILDABLE, CARD, Card, prepare, read_card
from laconic.models.foreign_folder import GGUF, refuse_foreign
from laconic.models.pretrained import Loaded
from laconic.models.processors import plain_task
from laconic.models.sample_signature import infer_inputs
from laconic.models.signature import order_inputs, probe_module
from laconic.models.special_tokens import read_chat_template
from laconic.models.weights import (
    check_finite,
    fill,
    fingerprint,
    is_program,
    read_safetensors,
    scan_weights,
    tie,
    write_weights,
)
from laconic.tasks.task import Task, open_task
from laconic.tensor import TensorSpec

WEIGHTS = "model.safetensors"
ONE_LENGTH = (
    "A model that takes inputs of one length alone, as Nystromformer, can be given with a --builder, and samples of "
    "that length in an .npz file"
)
BUILD = {"huggingface": huggingface.build, "timm": timm_folder.build, "builder": builders.build}
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

    def after(self, record: Record, module: nn.Module) -> "Checkpoint":
        """The checkpoint after a stage; outputs keep their names, and may have other shapes."""
        module = prepare(module)
        return Checkpoint.of(
            module,
            self.task,
            outputs=probe_module(
                module, self.inputs, tuple(spec.name for spec in self.outputs), self.task.sample_inputs
            ),
            source=self.source,
            size=self.size,
            history=(*self.history, record),
            licence=self.licence,
        )

    def save(self, folder: Path) -> None:
        """Write the folder, whole or not at all, in place of an earlier checkpoint.

        Raises UsageError where something else is in the way, SourceError for a module that cannot be built again.
        """
        self.check_buildable()
        known = (folder / CARD).is_file() or is_adapter(folder)
        if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not known):
            raise UsageError(
                f"{folder} exists and is not a checkpoint: it will not be overwritten. Choose another folder"
            )
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
        module = rebuild_from_card(card, folder, trust=trust)
        fill(module, read_safetensors(folder / WEIGHTS), folder / WEIGHTS)
        tie(module, card.tied)
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
        is_stored = card.stored is None or scan_weights([folder / WEIGHTS]).digest == card.stored
        if loaded.key != card.key or not is_stored:
            raise SourceError(f"{folder} is not the checkpoint that was saved: its files were changed. Copy it again")
        return loaded


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


def is_onnx(source: Path) -> bool:
    """Whether a source is an ONNX file: a graph already, and no checkpoint."""
    return source.suffix == ".onnx"


def load_source(
    source: Path,
    *,
    task: str | None = None,
    builder: str | None = None,
    arguments: dict[str, Any] | None = None,
    inputs: tuple[TensorSpec, ...] | None = None,
    samples: Arrays | None = None,
    trust: bool = False,
) -> Checkpoint:
    """Open a trained model in any supported format.

    source: a folder of transformers or sentence-transformers; a file of weights, with the `builder`
    ("package.module:factory") and the `arguments` that make the module, and the `inputs` that it takes; or a
    checkpoint saved before. samples: arrays by input, from which the inputs are found where nothing states them.
    trust: lets a source execute code that it carries.
    Raises SourceError, UntrustedSource.
    """
    if not source.exists():
        raise SourceError(f"{source} does not exist; expected a model's folder, or a file of weights")
    if is_onnx(source):
        raise SourceError(f"{source} is an ONNX file: a graph, not a checkpoint. Stages that train need the checkpoint")
    if source.is_dir():
        return _load_folder(source, task, builder, trust)
    if source.suffix.lower() == ".gguf":
        raise SourceError(f"{source} holds weights in GGUF, {GGUF}")
    if is_program(source):
        module, origin, own = builders.load_program(source, trust=trust)
    else:
        module, origin = builders.load(source, builder, arguments or {}, trust=trust)
        own = tuple(getattr(module, "inputs", ()))
    stated = inputs or own
    if not stated and samples is not None:
        stated = infer_inputs(prepare(module), samples)
    return _with_signature(module, origin, stated, task, source)


def _load_folder(folder: Path, task: str | None, builder: str | None, trust: bool) -> Checkpoint:
    if (folder / CARD).is_file():
        return Checkpoint.load(folder, trust=trust)
    if is_adapter(folder):
        return _load_adapter(folder, task, trust)
    if builder:
        raise SourceError(f"{folder} is a folder; with a --builder, expected the file of weights (.safetensors, .pt)")
    if not (folder / "config.json").is_file() and not (folder / "modules.json").is_file():
        refuse_foreign(folder)
        if (folder / MANIFEST).is_file():
            raise SourceError(f"{folder} is an artifact, for engines alone. Give the checkpoint that it was made from")
        raise SourceError(
            f"{folder} has neither {CARD} nor config.json; expected a saved checkpoint or a folder of transformers "
            f"or timm. For a model of your own, give the file of weights and a --builder"
        )
    return make_checkpoint(load_model(folder, task=task, trust=trust), folder)


def make_checkpoint(found: Loaded, folder: Path, *, head: tuple[Any, ...] = ()) -> Checkpoint:
    """Make the checkpoint of a loaded folder. head: what a new head was made from beside the folder, JSON-ready.

    Raises SourceError for weights that are NaN or infinite, and for a model that does not run.
    """
    scan = scan_weights(found.files) if all(path.suffix == ".safetensors" for path in found.files) else None
    if scan is None or not scan.finite:
        check_finite(found.module, folder)
    made = found.task
    outputs = probe_module(prepare(found.module), made.inputs, (found.output,), made.sample_inputs, advice=ONE_LENGTH)
    return Checkpoint.of(
        found.module,
        made,
        outputs=outputs,
        source=found.source,
        size=found.size,
        licence=read_licence(folder),
        weights=scan and hash_of(scan.digest, *head),
    )


def load_model(folder: Path, *, task: str | None, trust: bool, labels: Sequence[str] = (), seed: int = 0) -> Loaded:
    """Load a folder of transformers, sentence-transformers or timm.

    labels: the classes of a new head, drawn from the seed, in the place of the folder's own if it has one.
    Raises SourceError for a model of another kind or a damaged one, UntrustedSource for one that brings its own code,
    MissingPackage where the library is not installed.
    """
    if timm_folder.is_timm(folder):
        return timm_folder.load(folder, task=task, labels=labels, seed=seed)
    return huggingface.load(folder, task=task, trust=trust, labels=labels, seed=seed)


def _load_adapter(folder: Path, task: str | None, trust: bool) -> Checkpoint:
    """The model that an adapter belongs to, with the adapter merged into its weights."""
    adapter = read_adapter(folder)
    if not adapter.base.is_dir() or adapter.base.resolve() == folder.resolve():
        raise SourceError(
            f"{folder} is an adapter of {str(adapter.base)!r}, and there is no such folder. Name the folder of its "
            f"model as base_model_name_or_path in adapter_config.json"
        )
    base = _load_folder(adapter.base, task, None, trust)
    adapter.merge_into(base.module)
    template = read_chat_template(folder)
    given = base if template is None else replace(base, task=base.task.with_chat_template(template.text))
    config = {"adapter": folder.name}
    key = hash_of(base.key, "adapter", fingerprint(base.module))
    return given.after(Record(stage="finetune", config=config, key=key, figures={}), base.module)


def _with_signature(
    module: nn.Module, origin: dict[str, Any], inputs: tuple[TensorSpec, ...], task: str | None, path: Path
) -> Checkpoint:
    """A checkpoint of a plain module. task: by default the one for plain arrays."""
    if not inputs:
        raise SourceError(
            f"nothing says which tensors the module in {path} takes. Give samples in an .npz file (--data), whose "
            f"arrays are named as the parameters of forward; or `inputs` in the recipe"
        )
    module = prepare(module)
    check_finite(module, path)
    inputs = order_inputs(module, inputs)
    purpose = plain_task(task, inputs, path)
    return Checkpoint.of(module, purpose, outputs=probe_module(module, inputs), source=origin, size=path.stat().st_size)


def read_licence(folder: Path) -> str | None:
    """The licence that the model's README.md states in its front matter."""
    readme = folder / "README.md"
    parts = readme.read_text(encoding="utf-8", errors="replace").split("---\n", 2) if readme.is_file() else []
    if len(parts) < 3 or parts[0].strip():
        return None
    try:
        front = yaml.safe_load(parts[1])
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a date or a number that there is not
        return None
    licence = front.get("license") if isinstance(front, dict) else None
    return str(licence) if licence else None


def check_free(destination: Path) -> None:
    """Raise UsageError where the checkpoint could not be written in the end."""
    taken = destination.exists() and not destination.is_dir()
    known = (destination / CARD).is_file() or is_adapter(destination)
    if taken or (destination.is_dir() and any(destination.iterdir()) and not known):
        raise UsageError(
            f"{destination} exists and is not a checkpoint: it will not be overwritten. Choose another --output"
        )
    if not destination.name:
        raise UsageError(f"{destination} is no folder that could be written. Choose another --output")
    for parent in destination.parents:
        if parent.exists() and not parent.is_dir():
            raise UsageError(f"{parent} is a file, so {destination} cannot be made in it. Choose another --output")
