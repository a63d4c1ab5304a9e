"""What is taken through the command line: a model's files, its samples, and what the library that wrote it answers."""

import importlib
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import transformers
from family_checkpoint import CLASSES, CLASSIFIER, LETTERS, Family, write_images, write_sounds, write_texts
from family_images import IMAGE_FAMILIES
from family_maps import MAP_FAMILIES
from family_modules import MODULES
from family_sounds import SOUND_FAMILIES
from family_texts import TEXT_FAMILIES
from family_timm import prepare_image, write_timm
from family_writers import WRITER_FAMILIES, compare_written, write_targets
from PIL import Image
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from laconic.models.checkpoint import Checkpoint
from laconic.models.signature import call, name_outputs
from laconic.models.source_loading import load_source
from laconic.tasks.decoder_tensors import PROBABILITIES

COMPARED = 8
"""Samples that are compared with the library."""
Pairs = Iterator[tuple[Tensor, Tensor]]
"""Outputs of the opened checkpoint and of the library, sample by sample."""


@dataclass(frozen=True)
class Subject:
    """source: a folder, or a file of weights, which the builder with its arguments makes a module for. data: samples.
    pairs: from the opened checkpoint to what is compared. prunes: kinds of pruning to try, see `families.PRUNE`."""

    source: Path
    data: Path
    pairs: Callable[[Checkpoint], Pairs]
    prunes: tuple[str, ...]
    builder: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def open(self) -> Checkpoint:
        """The checkpoint, as a command opens it."""
        samples = dict(np.load(self.data)) if self.builder else None
        return load_source(self.source, builder=self.builder, arguments=dict(self.arguments), samples=samples)

    @property
    def options(self) -> list[str]:
        """What a command is told beside source and data."""
        return ["--builder", self.builder] if self.builder else []


def make_subject(group: str, name: str, folder: Path) -> Subject:
    """Write the files of a subject to a folder, unless they are there."""
    return {"transformers": make_family, "timm": make_timm, "modules": make_module}[group](name, folder)


def make_family(name: str, folder: Path) -> Subject:
    """A family of transformers."""
    family = (TEXT_FAMILIES | WRITER_FAMILIES | IMAGE_FAMILIES | MAP_FAMILIES | SOUND_FAMILIES)[name]
    source = folder / "source"
    if not source.exists():
        family.write(source)
    data = write_samples(family, folder)
    prunes = ("heads and FFN", "FFN", "heads", *(("channels",) if family.reads == "images" else ()))

    def pairs(checkpoint: Checkpoint) -> Pairs:
        if checkpoint.task.generation is not None:
            yield from compare_written(family, source, checkpoint, read_samples(family, data))
            return
        model = getattr(transformers, f"{family.config}{family.head}").from_pretrained(source).eval()
        for value in read_samples(family, data):
            inputs = checkpoint.task.encode([checkpoint.task.parse(value)])
            with torch.inference_mode():
                outputs = call(checkpoint.module, {key: torch.from_numpy(each) for key, each in inputs.items()})
                expected = answer(family, model, source, value)
                if PROBABILITIES in outputs:  # a language model without a cache
                    yield outputs[PROBABILITIES][:, -1], expected.softmax(dim=-1)
                else:
                    yield next(iter(outputs.values())), expected

    return Subject(source, data, pairs, prunes)


def write_samples(family: Family, folder: Path) -> Path:
    """Samples of the kind that a family reads, without their classes where it does not tell classes apart."""
    if family.reads == "images":
        return write_images(folder / "images", classes=not family.head.endswith(("Detection", "Segmentation")))
    if family.reads == "sounds":
        return write_sounds(folder / "sounds", classes=family.head == CLASSIFIER)
    if family.writes:
        return write_targets(folder / "texts.csv")
    return write_texts(folder / "texts.csv", LETTERS if family.reads_bytes else CLASSES)


def make_module(name: str, folder: Path) -> Subject:
    """A module of one's own."""
    kind, draw = MODULES[name]
    return make_built(folder, f"{kind.__module__}:{kind.__name__}", {}, kind, draw)


def make_timm(name: str, folder: Path) -> Subject:
    """A model of timm, in the folder that timm writes."""
    timm = importlib.import_module("timm")  # not a dependency: only these rows need it
    source, data = folder / "source", write_images(folder / "images")
    images = sorted(data.glob("*/*.png"))
    if not source.exists():
        write_timm(name, source, images)

    def pairs(checkpoint: Checkpoint) -> Pairs:
        model = timm.create_model(f"local-dir:{source}", pretrained=True).eval()
        for path in images[:COMPARED]:
            inputs = checkpoint.task.encode([checkpoint.task.parse(path)])
            with torch.inference_mode():
                (found,) = call(
                    checkpoint.module, {key: torch.from_numpy(each) for key, each in inputs.items()}
                ).values()
                yield found, model(prepare_image(model, path)[None])

    return Subject(source, data, pairs, ("channels", "heads and FFN", "FFN", "heads"))


def make_built(
    folder: Path,
    builder: str,
    arguments: Mapping[str, Any],
    make: Callable[[], nn.Module],
    draw: Callable[[], Mapping[str, np.ndarray[Any, Any]]],
) -> Subject:
    """A module with a builder: weights from a fixed seed, which a few batches have normalized, and samples."""
    source, data = folder / "weights.safetensors", folder / "samples.npz"
    samples = {key: torch.from_numpy(array) for key, array in draw().items()}
    if not source.exists():
        torch.manual_seed(0)
        module = make().train()
        with torch.no_grad():
            for start in range(0, 96, 32):
                module(*(array[start : start + 32] for array in samples.values()))
        save_model(module, str(source))
        arrays: dict[str, Any] = {key: array.numpy() for key, array in samples.items()}
        np.savez(data, **arrays)

    def pairs(checkpoint: Checkpoint) -> Pairs:
        module = make().eval()
        load_model(module, source)
        some = {key: array[:COMPARED] for key, array in samples.items()}
        with torch.inference_mode():
            found, expected = call(checkpoint.module, some), name_outputs(module(*some.values()))
        yield from ((found[key], expected[key]) for key in expected)

    return Subject(source, data, pairs, ("channels", "heads and FFN", "FFN"), builder, arguments)


def read_samples(family: Family, data: Path) -> list[Any]:
    """A few samples of the data."""
    if family.reads != "texts":
        return [path.read_bytes() for path in sorted((*data.glob("*.*"), *data.glob("*/*.*")))[:COMPARED]]
    return [line.rpartition(",")[0] for line in data.read_text(encoding="utf-8").splitlines()[1 : 1 + COMPARED]]


def answer(family: Family, model: Any, source: Path, value: Any) -> Tensor:
    """What transformers answers: logits, those of the next token, a pooled vector, or the mean of the hidden states."""
    if family.reads == "sounds":
        extractor = transformers.AutoFeatureExtractor.from_pretrained(source)
        waveform, rate = soundfile.read(io.BytesIO(value), dtype="float32")
        logits: Tensor = model(**extractor(waveform, sampling_rate=rate, return_tensors="pt")).logits
        return logits
    if family.reads == "images":
        processor = transformers.AutoImageProcessor.from_pretrained(source, backend="pil")
        outputs = model(**processor(images=Image.open(io.BytesIO(value)), return_tensors="pt"))
        if "logits" in outputs:
            found: Tensor = outputs.logits
            return found
        pooled: Tensor | None = outputs.get("pooler_output")
        return outputs.last_hidden_state[:, 0] if pooled is None else pooled
    tokens = transformers.AutoTokenizer.from_pretrained(source)(value, return_tensors="pt", truncation=True)
    taken = {key: each for key, each in tokens.items() if key != "token_type_ids" or takes_types(model)}
    outputs = model(**taken)
    if "logits" not in outputs:
        mean: Tensor = outputs.last_hidden_state.mean(dim=1)
        return mean
    logits = outputs.logits
    return logits[:, -1] if logits.ndim == 3 else logits


def takes_types(model: Any) -> bool:
    """Whether a model tells the two texts of a pair apart."""
    return getattr(model.config, "type_vocab_size", 0) > 1
