"""Models saved by transformers: config.json, weights, and a tokenizer or an image processor."""

import inspect
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from laconic.errors import SourceError, UntrustedSource
from laconic.models.classifier import ImageClassifier, TextClassifier
from laconic.models.embedder import (
    MODULES,
    EmbedderConfig,
    SentenceTransformer,
    TextEmbedder,
    fill_projections,
    read_json,
    read_modules,
)
from laconic.models.language_model import LanguageModel, check
from laconic.models.pretrained import AUTO, classes, from_pretrained, options, quiet
from laconic.models.processors import read_preprocess, read_tokenizer
from laconic.tasks.causal_lm import CausalLm
from laconic.tasks.image_classification import ImageClassification
from laconic.tasks.task import Task
from laconic.tasks.text_classification import TextClassification
from laconic.tasks.text_embedding import TextEmbedding
from laconic.tensor import BATCH, TensorSpec

UNTOLD = ("_name_or_path", "_commit_hash", "transformers_version", "auto_map")
"""Keys of config.json that say nothing about the model, or name a place on somebody's disk."""


@dataclass(frozen=True)
class Loaded:
    """A module, its task, and how to build the same module again. size: bytes of the files with weights."""

    module: nn.Module
    task: Task
    output: str
    source: dict[str, Any]
    size: int


def load(folder: Path, *, task: str | None, trust: bool, labels: Sequence[str] = (), seed: int = 0) -> Loaded:
    """Load a folder of transformers or sentence-transformers.

    labels: the classes of a new head, drawn from the seed, in the place of the folder's own if it has one.
    Raises SourceError for a model of another kind or a damaged one, UntrustedSource for one that brings its own code.
    """
    bare = bool(labels) or task in (None, "text-embedding")
    sentence = read_modules(folder) if (folder / MODULES).is_file() and bare else None
    where = sentence.encoder if sentence else folder
    config = read_json(where / "config.json")
    if config.get("auto_map") and not trust:
        raise UntrustedSource(
            f"{where} brings its own code ({', '.join(sorted(map(str, config['auto_map'])))}), and loading it would "
            f"execute that code. Read it first, then say --trust"
        )
    task = task or ("text-embedding" if sentence else task_of(where, config))
    if task not in AUTO:
        raise SourceError(f"{where} cannot be loaded for the task {task!r}; expected one of {', '.join(AUTO)}")
    if labels:
        config = with_classes(config, labels)
    check_classes(where, config, task)
    model, size = from_pretrained(where, task, trust=trust, labels=labels, seed=seed)
    if task == "image-classification":
        return _image_classifier(where, config, model, size)
    return _text_model(where, config, task, sentence, model, size)


def task_of(folder: Path, config: Mapping[str, Any]) -> str:
    """The task that the architecture is for. Raises SourceError where it is for none of ours."""
    name = str((config.get("architectures") or ["nothing"])[0])
    for ending, task in (
        ("ForSequenceClassification", "text-classification"),
        ("ForImageClassification", "image-classification"),
        ("ForCausalLM", "causal-lm"),
        ("LMHeadModel", "causal-lm"),
        ("Model", "text-embedding"),
    ):
        if name.endswith(ending):
            return task
    raise SourceError(
        f"{folder} holds a model of architecture {name}; expected one for sequence or image classification, "
        f"a causal language model, or a bare encoder. Name a --task it can serve ({', '.join(AUTO)}), or give "
        f"a --builder"
    )


def check_classes(folder: Path, config: Mapping[str, Any], task: str) -> None:
    """Raise SourceError for a classifier whose answer is not one of several classes."""
    if task not in (TextClassification.name, ImageClassification.name):
        return
    kind, labels = config.get("problem_type"), config.get("id2label")
    count = len(labels) if labels else config.get("num_labels", 2)
    if count < 2 or kind in ("regression", "multi_label_classification"):
        raise SourceError(
            f"{folder} answers with {kind or 'a single score'}; expected one of several classes. Build it in a "
            f"function of your own, and give it with --builder and --task tensors"
        )


def _text_model(
    folder: Path, config: Mapping[str, Any], task: str, sentence: SentenceTransformer | None, model: Any, size: int
) -> Loaded:
    embedder = sentence.config if sentence else EmbedderConfig()
    source = source_of(folder, config, task) | (
        {"embedder": embedder.model_dump(mode="json")} if task == "text-embedding" else {}
    )
    tokenizer, pad_id, limit = read_tokenizer(folder, model.config, lower=sentence is not None and sentence.lower)
    limits = [limit, positions(model), sentence.max_tokens if sentence else None]
    max_tokens = min(value for value in limits if value is not None)
    names = ["input_ids", "attention_mask"]
    pairs = any(tokenizer.encode("a", "b").type_ids)
    if task == "text-classification" and pairs and takes_types(model):
        names.append("token_type_ids")
    inputs = tuple(
        TensorSpec(name=name, dtype="int64", shape=(BATCH, "seq"), bounds={"seq": (1, max_tokens)}) for name in names
    )
    if task == "text-classification":
        labels = read_labels(config)
        made = TextClassification(tokenizer, inputs, max_tokens=max_tokens, pad_id=pad_id, labels=labels)
        return Loaded(TextClassifier(model), made, "logits", source, size)
    if task == "causal-lm":
        language = LanguageModel(model)
        check(language, folder)
        start_id = start_of(model.config, pad_id)
        lm = CausalLm(tokenizer, inputs, max_tokens=max_tokens, pad_id=pad_id, start_id=start_id)
        return Loaded(language, lm, "logits", source, size)
    module = TextEmbedder(model, embedder)
    if sentence:
        fill_projections(module, sentence.weights)
        size += sum(path.stat().st_size for path in sentence.weights)
    purpose = TextEmbedding(tokenizer, inputs, max_tokens=max_tokens, pad_id=pad_id)
    return Loaded(module, purpose, "embedding", source, size)


def _image_classifier(folder: Path, config: Mapping[str, Any], model: Any, size: int) -> Loaded:
    source = source_of(folder, config, "image-classification")
    preprocess = read_preprocess(folder, channels=int(getattr(model.config, "num_channels", 3)))
    sides: tuple[int | str, ...] = preprocess.crop or preprocess.resize or ("height", "width")
    spec = TensorSpec(name="pixel_values", dtype="float32", shape=(BATCH, preprocess.channels, *sides))
    task = ImageClassification((spec,), preprocess=preprocess, labels=read_labels(config))
    return Loaded(ImageClassifier(model), task, "logits", source, size)


def with_classes(config: Mapping[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    """The config of the same model with a head for these classes."""
    kept = {key: value for key, value in config.items() if key != "num_labels"}
    return kept | classes(labels)


def source_of(folder: Path, config: Mapping[str, Any], task: str) -> dict[str, Any]:
    """How to build the module again; with the code that the model brings, where it brings any."""
    kept = {key: value for key, value in config.items() if key not in UNTOLD}
    source = {"kind": "huggingface", "task": task, "config": kept}
    if not config.get("auto_map"):
        return source
    kept["auto_map"] = config["auto_map"]
    return source | {"code": {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}}


def build(source: Mapping[str, Any]) -> nn.Module:
    """The module, with weights that mean nothing yet.

    It is built in full, not on the meta device, so that buffers which are not saved hold what they should.
    """
    task = source["task"]
    try:
        with quiet(), torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
            for name, content in {**source.get("code", {}), "config.json": json.dumps(source["config"])}.items():
                (Path(folder) / Path(name).name).write_text(content, encoding="utf-8")
            trust = "code" in source  # whoever opens a checkpoint with code has been asked
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
            model = getattr(transformers, AUTO[task]).from_config(
                config, dtype=torch.float32, trust_remote_code=trust, **options(config, task)
            )
    except (ValueError, KeyError, TypeError, RuntimeError, OSError) as error:
        raise SourceError(f"transformers {transformers.__version__} cannot build this model: {error}") from error
    return wrap(model, source)


def wrap(model: Any, source: Mapping[str, Any]) -> nn.Module:
    """The module round a model of transformers."""
    if source["task"] == "text-embedding":
        return TextEmbedder(model, EmbedderConfig.model_validate(source["embedder"]))
    kinds = {"image-classification": ImageClassifier, "causal-lm": LanguageModel}
    return kinds.get(source["task"], TextClassifier)(model)


def positions(model: Any) -> int | None:
    """How many tokens the model has positions for; None where it says nothing.

    RoBERTa and its kin begin to count after the padding token's id, and their config counts those places too.
    """
    count = getattr(model.config, "max_position_embeddings", None)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.num_embeddings - module.padding_idx - 1
    return count if isinstance(count, int) and count > 0 else None


def start_of(config: Any, pad_id: int) -> int:
    """The token that begins a text, for texts without any of their own; else the one that ends it, else the padding."""
    ids = (getattr(config, name, None) for name in ("bos_token_id", "eos_token_id"))
    return next((index for index in ids if isinstance(index, int)), pad_id)


def takes_types(model: Any) -> bool:
    """Whether the model tells the first text of a pair from the second."""
    known = "token_type_ids" in inspect.signature(model.forward).parameters
    return known and getattr(model.config, "type_vocab_size", 0) > 1


def read_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the classes, in their order."""
    labels = config.get("id2label") or {}
    return tuple(str(labels[key]) for key in sorted(labels, key=int))
