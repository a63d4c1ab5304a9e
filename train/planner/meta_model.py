"""The model that is planned for, on the meta device: its structure without weights, so that no size is too large."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from laconic.config import NamedSettings
from laconic.errors import SourceError
from laconic.models import builder as builders
from laconic.models import huggingface, timm_folder, wrappers
from laconic.models.checkpoint import CARD, read_card, rebuild_from_card
from laconic.models.embedder import MODULES
from laconic.models.encoder_decoder import SpeechWriter
from laconic.models.processors import plain_task, resolve_task
from laconic.models.source_loading import is_onnx
from laconic.tasks.audio_preprocess import LogMelPreprocess
from laconic.tasks.generation_settings import GenerationSettings
from laconic.tasks.image_preprocess import ImagePreprocess
from laconic.tasks.preprocessing import Preprocessing
from laconic.tasks.task import Task, open_task
from laconic.tensor import TensorSpec
from train.objectives.choice import make_objective
from train.step.objective import Objective

IMAGE = 224
"""Pixels a side, where a config does not say."""
CONFIG = "config.json"


@dataclass(frozen=True, eq=False)
class MetaModel:
    """A model without weights. module: on the meta device. longest: the most tokens it takes; None without text.
    preference: the loss of preferences that it is trained by; None for the objective of its task."""

    name: str
    module: nn.Module
    task: Task
    longest: int | None
    preference: NamedSettings | None = None

    @property
    def parameters(self) -> int:
        """Number of its parameters; tied ones count once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    def copy(self) -> nn.Module:
        """Copy the module, for techniques to change."""
        return copy.deepcopy(self.module)

    def objective(self) -> Objective:
        """Make its training objective."""
        return make_objective(self.task, preference=self.preference)


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

    source: a folder of transformers or timm, of which config.json is enough; a saved checkpoint; or anything, with a
    `builder` that makes the module. Raises SourceError, UntrustedSource.
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
    if timm_folder.is_timm(folder):
        return from_timm(folder, task)
    return from_transformers(folder, task, trust)


def from_builder(
    source: Path, builder: str, arguments: dict[str, Any], inputs: tuple[TensorSpec, ...], task: str | None
) -> MetaModel:
    """Build a module of the user's own."""
    with torch.device("meta"):
        module = builders.build(builders.describe_source(builder, arguments))
    inputs = inputs or tuple(getattr(module, "inputs", ()))
    if not inputs:
        raise SourceError(
            f"nothing says which tensors the module of {builder} takes. Give `inputs` in the recipe, or set an "
            f"attribute `inputs` on the module: a tuple of TensorSpec"
        )
    return MetaModel(builder.partition(":")[2], module, plain_task(task, inputs, source), None)


def from_checkpoint(folder: Path, trust: bool) -> MetaModel:
    """Build the module of a checkpoint that was saved before."""
    card = read_card(folder, trust=trust)
    with torch.device("meta"):
        module = rebuild_from_card(card, folder, trust=trust)
    task = open_task(card.task, folder, card.inputs)
    return MetaModel(folder.name, module, task, task.max_length)


def from_transformers(folder: Path, task: str | None, trust: bool) -> MetaModel:
    """Build the module of a folder of transformers, or of sentence-transformers."""
    opened = huggingface.open_folder(folder, task, trust=trust)
    with torch.device("meta"):
        module = wrappers.build(opened.source)
    name = folder.resolve().name
    if "images" in opened.task.accepts:
        side, channels = opened.config.get("image_size") or IMAGE, opened.config.get("num_channels", 3)
        height, width = side if isinstance(side, list) else (side, side)
        images = Preprocessing(image=ImagePreprocess(channels=channels, resize=(height, width)))
        return MetaModel(name, module, opened.task.from_preprocessing(images), None)
    if isinstance(module, SpeechWriter):
        longest, speech = describe_speech(module)
        return MetaModel(name, module, opened.task.from_preprocessing(speech), longest)
    parts = (getattr(module, name, None) for name in ("model", "encoder"))  # as the wrappers call what they hold
    positions = huggingface.max_positions(next(part for part in (*parts, module) if part is not None))
    limits = [limit for limit in (positions, opened.max_tokens) if limit is not None]
    texts = Preprocessing(max_tokens=min(limits)) if limits else Preprocessing()
    return MetaModel(name, module, opened.task.from_preprocessing(texts), min(limits, default=None))


def describe_speech(module: SpeechWriter) -> tuple[int, Preprocessing]:
    """Return the most tokens that a model writes for a recording, and the spectrograms of 100 frames a second."""
    model: Any = module.model
    longest = int(model.config.max_target_positions)
    log_mel = LogMelPreprocess(
        feature_size=model.config.num_mel_bins, chunk_length=max(1, model.config.max_source_positions // 50)
    )
    generation = GenerationSettings(decoder_start_token_id=0, max_new_tokens=longest)
    return longest, Preprocessing(log_mel=log_mel, generation=generation)


def from_timm(folder: Path, task: str | None) -> MetaModel:
    """Build the module of a folder of timm."""
    source = timm_folder.describe_source(folder, task)
    with torch.device("meta"):
        module = timm_folder.build(source)
    channels, height, width = timm_folder.read_input_size(module)
    images = Preprocessing(image=ImagePreprocess(channels=channels, resize=(height, width)))
    return MetaModel(folder.resolve().name, module, resolve_task(source["task"]).from_preprocessing(images), None)
