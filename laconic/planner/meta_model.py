"""The model that is planned for, on the meta device: its structure without weights, so that no size is too large."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch import nn

from laconic import registry
from laconic.artifacts.record import Record
from laconic.errors import SourceError, UntrustedSource
from laconic.hashing import unseal
from laconic.models import builder as builders
from laconic.models import huggingface
from laconic.models.checkpoint import CARD, check_trust, is_onnx, rebuild
from laconic.models.embedder import MODULES, EmbedderConfig, read_json, read_modules
from laconic.models.processors import plain_task
from laconic.tasks.causal_lm import CausalLm
from laconic.tasks.image_classification import ImageClassification, ImagePreprocess
from laconic.tasks.task import Task
from laconic.tensor import BATCH, TensorSpec
from laconic.training.step.objective import Objective

IMAGE = 224
"""Pixels a side, where a config does not say."""
CONFIG = "config.json"


@dataclass(frozen=True, eq=False)
class MetaModel:
    """A model without weights. module: on the meta device. longest: the most tokens that it takes; None where it reads
    no text."""

    name: str
    module: nn.Module
    task: Task
    longest: int | None

    @property
    def parameters(self) -> int:
        """The number of its parameters; tied ones count once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    def copy(self) -> nn.Module:
        """A copy of the module, for techniques to change."""
        return copy.deepcopy(self.module)

    def objective(self) -> Objective:
        """The training objective of its task."""
        objective: Objective = registry.resolve("objective", self.task.name).of(self.task)
        return objective


def open_meta_model(
    source: Path,
    *,
    task: str | None = None,
    builder: str | None = None,
    arguments: dict[str, Any] | None = None,
    inputs: tuple[TensorSpec, ...] = (),
    trust: bool = False,
) -> MetaModel:
    """Read the structure of a model, and none of its weights.

    source: a folder of transformers, of which config.json is enough; a saved checkpoint; or anything, with a `builder`
    that makes the module. Raises SourceError, UntrustedSource.
    """
    if builder:
        return from_builder(source, builder, arguments or {}, inputs, task)
    if is_onnx(source):
        raise SourceError(
            f"{source} is an ONNX file: a graph cannot be trained. Give the checkpoint that it was made of"
        )
    folder = source.parent if source.name == CONFIG else source
    if (folder / CARD).is_file():
        return from_checkpoint(folder, trust)
    if not (folder / CONFIG).is_file() and not (folder / MODULES).is_file():
        raise SourceError(
            f"{source} has no {CONFIG}; expected a folder of transformers, of which {CONFIG} is enough, a saved "
            f"checkpoint, or a --builder"
        )
    return from_transformers(folder, task, trust)


def from_builder(
    source: Path, builder: str, arguments: dict[str, Any], inputs: tuple[TensorSpec, ...], task: str | None
) -> MetaModel:
    """A module of the user's own."""
    with torch.device("meta"):
        module = builders.build(builders.source_of(builder, arguments))
    inputs = inputs or tuple(getattr(module, "inputs", ()))
    if not inputs:
        raise SourceError(
            f"nothing says which tensors the module of {builder} takes. Give `inputs` in the recipe, or set an "
            f"attribute `inputs` on the module: a tuple of TensorSpec"
        )
    return MetaModel(builder.partition(":")[2], module, plain_task(task or "tensors", inputs, source), None)


def from_checkpoint(folder: Path, trust: bool) -> MetaModel:
    """A checkpoint that was saved before."""
    card = unseal(folder / CARD)
    check_trust(card, folder, trust)
    inputs = tuple(TensorSpec.model_validate(spec) for spec in card["inputs"])
    with torch.device("meta"):
        module = rebuild(card["source"], tuple(Record.model_validate(record) for record in card["history"]))
    task: Task = registry.resolve("task", card["task"]).from_assets(folder, inputs)
    return MetaModel(folder.name, module, task, getattr(task, "max_tokens", None))


def from_transformers(folder: Path, task: str | None, trust: bool) -> MetaModel:
    """A folder of transformers, or of sentence-transformers."""
    sentence = read_modules(folder) if (folder / MODULES).is_file() and task in (None, "text-embedding") else None
    where = sentence.encoder if sentence else folder
    config = read_json(where / CONFIG)
    if config.get("auto_map") and not trust:
        raise UntrustedSource(f"{where} brings its own code, and building it would execute that code. Say --trust")
    task = task or ("text-embedding" if sentence else huggingface.task_of(where, config))
    source = huggingface.source_of(where, config, task)
    if task == "text-embedding":
        embedder = sentence.config if sentence else EmbedderConfig()
        source["embedder"] = embedder.model_dump(mode="json")
    with torch.device("meta"):
        module = huggingface.build(source)
    if task == ImageClassification.name:
        side, channels = config.get("image_size") or IMAGE, config.get("num_channels", 3)
        height, width = side if isinstance(side, list) else (side, side)
        spec = TensorSpec(name="pixel_values", dtype="float32", shape=(BATCH, channels, height, width))
        images = ImagePreprocess(channels=channels, resize=(height, width))
        return MetaModel(folder.resolve().name, module, ImageClassification((spec,), preprocess=images), None)
    parts = (getattr(module, name, None) for name in ("model", "encoder"))  # as each task calls what it holds
    positions = huggingface.positions(next(part for part in (*parts, module) if part is not None))
    limits = [limit for limit in (positions, sentence.max_tokens if sentence else None) if limit is not None]
    longest = min(limits, default=None)
    return MetaModel(folder.resolve().name, module, text_task(task, longest), longest)


def text_task(name: str, longest: int | None) -> Task:
    """A task that reads text, with a tokenizer that knows one word: a plan needs shapes, and no words."""
    tokenizer = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
    limit = longest or 2**20
    inputs = tuple(
        TensorSpec(name=each, dtype="int64", shape=(BATCH, "seq"), bounds={"seq": (1, limit)})
        for each in ("input_ids", "attention_mask")
    )
    more = {"start_id": 0} if name == CausalLm.name else {}
    task: Task = registry.resolve("task", name)(tokenizer, inputs, max_tokens=limit, pad_id=0, **more)
    return task
