"""Models saved by transformers: config.json, weights, and a tokenizer or an image processor."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laconic.errors import SourceError, UntrustedSource
from laconic.models.audio_processor import read_log_mel, read_speech
from laconic.models.embedder import (
    MODULES,
    EmbedderConfig,
    SentenceTransformer,
    TextEmbedder,
    fill_projections,
    read_modules,
)
from laconic.models.encoder_decoder import EncoderDecoder, SpeechWriter, find_cache_shape, read_generation, read_prompt
from laconic.models.folder_weights import from_pretrained, has_pooler
from laconic.models.frame_settings import read_frames
from laconic.models.image_processor import open_processor, read_preprocess
from laconic.models.language_model import LanguageModel, check_causal, fit_cache, read_text_generation
from laconic.models.masked_language_model import MaskedLanguageModel, check_masked
from laconic.models.model_folder import QUANTIZATION, read_source_json, refuse_foreign
from laconic.models.object_detector import ObjectDetector, check_sides, read_scoring
from laconic.models.pretrained import ENCODER, Loaded, WritingModel, class_config
from laconic.models.processors import (
    find_mask_id,
    read_chat_template,
    read_end_token,
    read_special_tokens,
    read_tokenizer,
    resolve_task,
)
from laconic.models.speech import SpeechModel
from laconic.models.task_inference import check_head, infer_task, match_architecture, pretrained_tasks
from laconic.models.towers import ImageEmbedder, ImageTower, TextTower, ignores_padding
from laconic.models.vision_language_model import VisionLanguageModel
from laconic.models.wrappers import MASKED, SPEECH, WRAPPERS, wrap
from laconic.tasks.checkpoint_loading import count_outputs
from laconic.tasks.decoder_tensors import PROBABILITIES
from laconic.tasks.generation_settings import Prompt
from laconic.tasks.preprocessing import Activation, Preprocessing
from laconic.tasks.task import Task

ACTIVATIONS: dict[str, Activation] = {"Identity": "identity", "Sigmoid": "sigmoid"}
"""By the name of torch's class, what turns the output of a cross-encoder into a score."""

PROBED = 4
"""Tokens of the text by which it is found whether padding changes a vector."""

OMITTED = ("_name_or_path", "_commit_hash", "transformers_version", "auto_map", QUANTIZATION)
"""Keys of config.json that do not describe the model as it is loaded, or hold a path on somebody's disk."""


UNSTATED_LENGTH = 512
"""The most tokens where neither tokenizer nor model has a limit, as with relative positions or a recurrence. T5 and
BERT were trained with this length."""


@dataclass(frozen=True)
class ModelFolder:
    """A folder of transformers or sentence-transformers, read but for its weights.

    path: the folder with config.json. sentence: what modules.json says, where there is one and the model is an encoder.
    source: how to build the module.
    """

    path: Path
    task: type[Task]
    config: dict[str, Any]
    sentence: SentenceTransformer | None
    source: dict[str, Any]

    @property
    def max_tokens(self) -> int | None:
        """The longest text that sentence-transformers gives the model; None where it says nothing."""
        return self.sentence.max_tokens if self.sentence else None


def open_folder(folder: Path, task: str | None, *, trust: bool, labels: Sequence[str] = ()) -> ModelFolder:
    """Read a folder of transformers or sentence-transformers, and find its task where none is named.

    labels: the classes of a new head. Raises SourceError, UntrustedSource for one that brings its own code.
    """
    encoder = bool(labels) or task is None or resolve_task(task).auto_class == ENCODER
    sentence = read_modules(folder) if (folder / MODULES).is_file() and encoder else None
    path = sentence.encoder if sentence else folder
    refuse_foreign(path)
    config = read_source_json(path / "config.json")
    if config.get("auto_map") and not trust:
        raise UntrustedSource(
            f"{path} brings its own code ({', '.join(sorted(map(str, config['auto_map'])))}), and loading it would "
            f"execute that code. Read it first, then say --trust"
        )
    if task is None:
        task = match_architecture("SentenceTransformer") if sentence else infer_task(path, config)
    kind = resolve_task(str(task))
    if kind.auto_class not in WRAPPERS:
        raise SourceError(
            f"{path} cannot be loaded for the task {kind.name!r}; expected one of {', '.join(pretrained_tasks())}"
        )
    if labels:
        config = with_classes(config, labels, kind.problem_type)
    source = describe_source(path, config, kind.name)
    if kind.auto_class == ENCODER and "images" in kind.accepts:
        source["pooler"] = "auto_map" in config or has_pooler(path)
    elif kind.auto_class == ENCODER:
        embedder = sentence.config if sentence else EmbedderConfig()
        source["embedder"] = embedder.model_dump(mode="json")
    if kind.auto_class == MASKED:
        source["mask_id"] = find_mask_id(path)
    return ModelFolder(path, kind, config, sentence, source)


def load(folder: Path, *, task: str | None, trust: bool, labels: Sequence[str] = (), seed: int = 0) -> Loaded:
    """Load a folder of transformers or sentence-transformers.

    labels: the classes of a new head, drawn from the seed, in the place of the folder's own if it has one.
    Raises SourceError for a model of another kind or a damaged one, UntrustedSource for one that brings its own code.
    """
    opened = open_folder(folder, task, trust=trust, labels=labels)
    kind, sentence = opened.task, opened.sentence
    if kind.has_class_head:
        check_head(opened.path, opened.config, kind)
    model, files = from_pretrained(
        opened.path,
        str(kind.auto_class),
        trust=trust,
        labels=labels,
        problem_type=kind.problem_type,
        pooler=opened.source.get("pooler", False),
        seed=seed,
    )
    parameters = count_parameters(model)
    module = wrap(model, opened.source)
    size = round(sum(path.stat().st_size for path in files) * count_parameters(module) / parameters)
    made = fit_cache(kind.from_preprocessing(read_preprocessing(opened, model, module)), module)
    if count := count_embeddings(model):
        made.limit_ids(count)
    if isinstance(module, LanguageModel):
        check_causal(module, opened.path)
    if isinstance(module, MaskedLanguageModel):
        check_masked(module, opened.path)
    if sentence and isinstance(module, TextEmbedder):
        fill_projections(module, sentence.weights)
        files = [*files, *sentence.weights]
        size += sum(path.stat().st_size for path in sentence.weights)
    embedders = (TextEmbedder, ImageEmbedder, ImageTower, TextTower)
    output = "embedding" if isinstance(module, embedders) else "logits"
    output = PROBABILITIES if isinstance(module, WritingModel) else output
    return Loaded(module, made, output, opened.source, size, tuple(files))


def read_preprocessing(opened: ModelFolder, model: Any, module: nn.Module) -> Preprocessing:
    """Read the image settings or the tokenizer of a folder, and its classes. Raises SourceError where they are
    missing."""
    labels = name_classes(opened.config) if opened.task.has_class_head else read_labels(opened.config)
    if "images" in opened.task.accepts:
        image = read_preprocess(opened.path, channels=int(getattr(model.config, "num_channels", 3)))
        if not isinstance(module, ObjectDetector):
            return Preprocessing(image=image, labels=labels)
        check_sides(model, opened.path, image)
        return Preprocessing(image=image, labels=labels, scoring=read_scoring(open_processor(opened.path)))
    if isinstance(module, SpeechModel):
        return read_speech(opened.path, module, labels, writes=opened.task.auto_class == SPEECH)
    if isinstance(module, SpeechWriter):
        return read_speech_writer(opened.path, model)
    lower = opened.sentence is not None and opened.sentence.lower
    tokenizer, pad_id, limit = read_tokenizer(opened.path, model.config, lower=lower)
    if opened.task.has_class_head:
        set_pad_token(opened, model, pad_id)
    limits = [value for value in (limit, max_positions(model), opened.max_tokens) if value is not None]
    made = Preprocessing(
        tokenizer=tokenizer,
        max_tokens=min(limits, default=UNSTATED_LENGTH),
        pad_id=pad_id,
        start_id=start_token(model.config, pad_id),
        end_id=read_end_token(opened.path, tokenizer, model.config),
        chat=read_chat_template(opened.path),
        fixed_length=isinstance(module, TextTower) and not ignores_padding(module, PROBED, pad_id),
        token_types=any(tokenizer.encode("a", "b").type_ids) and takes_token_types(model, module),
        labels=labels,
        activation=read_activation(opened.config),
        mask_id=opened.source.get("mask_id"),
    )
    if isinstance(module, LanguageModel):
        generation = read_text_generation(model, pad_id, made.start_id, made.end_id, made.max_tokens)
        made = replace(made, generation=generation)
    if isinstance(module, VisionLanguageModel):
        return add_image(made, opened.path, module)
    if not isinstance(module, EncoderDecoder):
        return made
    return add_generation(made, model, {"input_ids": torch.tensor([[made.start_id]])}, opened.path)


def read_speech_writer(folder: Path, model: Any) -> Preprocessing:
    """Read the spectrograms, the tokenizer and the settings of generation of a model that writes what is said. Raises
    SourceError where a part is missing, or transformers reads it in another way."""
    log_mel = read_log_mel(folder, model.config)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        raise SourceError(
            f"{folder} has no tokenizer.json, which makes a text of what the model writes. Copy the folder again, with "
            f"its tokenizer"
        )
    tokenizer, pad_id, _ = read_tokenizer(folder, model.config, special=False)
    made = Preprocessing(tokenizer=tokenizer, log_mel=log_mel, pad_id=pad_id)
    silence = torch.zeros(1, log_mel.feature_size, log_mel.frames)
    prompt = read_prompt(model.config, model.generation_config, folder)
    return add_generation(made, model, {"input_features": silence}, folder, prompt)


def add_generation(
    made: Preprocessing, model: Any, source: Mapping[str, Tensor], folder: Path, prompt: Prompt | None = None
) -> Preprocessing:
    """Return the same preprocessing with the settings of generation. source: what the encoder reads, of one sample."""
    generation = read_generation(model, made.pad_id, folder, prompt)
    shape = find_cache_shape(model, source, generation.decoder_start_token_id, folder)
    return replace(made, generation=generation, cache_shape=shape)


def add_image(made: Preprocessing, folder: Path, module: VisionLanguageModel) -> Preprocessing:
    """Return the same preprocessing with that of images, and the places that they take in a text."""
    config: Any = module.model.config
    frames = read_frames(folder, channels=int(getattr(config.vision_config, "num_channels", 3)))
    side = module.family.measure_side(config.vision_config)
    if frames.sides != (side, side):
        raise SourceError(
            f"the image processor of {folder} makes frames of {frames.sides} pixels, and the model reads {side} x "
            f"{side}. Copy the folder again"
        )
    patches = module.count_patches((frames.channels, side, side))
    return replace(made, frames=frames.model_copy(update={"patches": patches}), image_id=int(config.image_token_id))


def read_activation(config: Mapping[str, Any]) -> Activation:
    """Return what turns a single output into a score, as in transformers' pipeline and in sentence-transformers."""
    settings = config.get("sentence_transformers") or {}
    named = settings.get("activation_fn") or config.get("sbert_ce_default_activation_function")
    if named:
        kind = str(named).rpartition(".")[2]
        if kind not in ACTIVATIONS:
            raise SourceError(f"the scores have the activation {kind!r}; expected one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[kind]
    return "identity" if config.get("problem_type") == "regression" else "sigmoid"


def with_classes(config: Mapping[str, Any], labels: Sequence[str], problem_type: str | None) -> dict[str, Any]:
    """Return the config of the same model with a head for these classes."""
    kept = {key: value for key, value in config.items() if key not in ("num_labels", "problem_type")}
    return kept | class_config(labels, problem_type)


def describe_source(folder: Path, config: Mapping[str, Any], task: str) -> dict[str, Any]:
    """Return how to build the module again; with the code that the model brings, where it brings any."""
    kept = {key: value for key, value in config.items() if key not in OMITTED}
    source = {"kind": "huggingface", "task": task, "config": kept}
    if not config.get("auto_map"):
        return source
    kept["auto_map"] = config["auto_map"]
    return source | {"code": {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}}


def max_positions(model: Any) -> int | None:
    """Return how many tokens the model has position embeddings for; None where it says nothing.

    RoBERTa and its relatives count positions from the padding token's id + 1, and their config counts those below too.
    """
    count = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.num_embeddings - module.padding_idx - 1
    return count if isinstance(count, int) and count > 0 else None


def count_embeddings(model: Any) -> int | None:
    """Count the ids that a model has embeddings for; None where it does not say."""
    try:
        table = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return table.num_embeddings if isinstance(table, nn.Embedding) else None


def start_token(config: Any, pad_id: int) -> int:
    """Return the token that stands for an empty text: the one that begins a text, else the one that ends it, else
    padding."""
    ids = (getattr(config, name, None) for name in ("bos_token_id", "eos_token_id"))
    return next((index for index in ids if isinstance(index, int)), pad_id)


def count_parameters(module: nn.Module) -> int:
    """Count the numbers in a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def takes_token_types(model: Any, module: nn.Module) -> bool:
    """Return whether a model, and the module around it, distinguish the two texts of a pair."""
    known = all("token_type_ids" in inspect.signature(part.forward).parameters for part in (model, module))
    return known and getattr(model.config, "type_vocab_size", 0) > 1


def read_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Read the names of the classes in a config, by number."""
    labels = config.get("id2label") or {}
    return tuple(str(labels[key]) for key in sorted(labels, key=int))


def name_classes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the classes of a head: those in its config, or the names that transformers gives them."""
    return read_labels(config) or tuple(f"LABEL_{index}" for index in range(count_outputs(config)))


def set_pad_token(opened: ModelFolder, model: Any, pad_id: int) -> None:
    """Give a classifier whose config names no padding token that of its tokenizer, by which a decoder finds the end of
    a text. pad_id: of the tokenizer, where it has one."""
    inner = model.config.get_text_config()
    if inner.pad_token_id is None and "pad_token" in read_special_tokens(opened.path):
        inner.pad_token_id = pad_id
        nested = opened.source["config"].get("text_config")
        (nested if isinstance(nested, dict) else opened.source["config"])["pad_token_id"] = pad_id
