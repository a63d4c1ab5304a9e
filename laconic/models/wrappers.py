"""Modules around the models of transformers, by the Auto class that builds the model: plain tensors in and out.

A module is built from its source, which a checkpoint holds, without its weights.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from laconic import registry
from laconic.errors import SourceError
from laconic.models.embedder import EmbedderConfig, TextEmbedder
from laconic.models.encoder_decoder import EncoderDecoder, SpeechWriter
from laconic.models.language_model import LanguageModel
from laconic.models.masked_language_model import MaskedLanguageModel
from laconic.models.object_detector import ObjectDetector
from laconic.models.pretrained import ENCODER, WrappedModel, model_class, model_options, quiet
from laconic.models.processors import resolve_task
from laconic.models.speech import SpeechModel
from laconic.models.towers import ImageEmbedder, ImageTower, TextTower, has_towers
from laconic.models.vision_language_model import VisionLanguageModel

MASKED = "AutoModelForMaskedLM"
"""The Auto class of masked language models."""
SPEECH = "AutoModelForCTC"
"""The Auto class of models that write what is said."""


class TextClassifier(WrappedModel):
    """input_ids, attention_mask and, for models of pairs, token_type_ids, [batch, seq] int64, to [batch, classes]."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        return self.read(self.model(input_ids=input_ids, attention_mask=attention_mask, **types), attention_mask)

    def read(self, answer: Any, attention_mask: Tensor) -> Tensor:
        """Return the output of this module from what the model answers."""
        logits: Tensor = answer.logits
        return logits


class TokenClassifier(TextClassifier):
    """As TextClassifier, to the logits [batch, seq, classes]; zeros at the padding, so that the answer to a text does
    not depend on its batch."""

    def read(self, answer: Any, attention_mask: Tensor) -> Tensor:
        return clear_padding(answer.logits, attention_mask)


class QuestionAnswerer(TextClassifier):
    """As TokenClassifier, to [batch, seq, 2]: the logits of the first and of the last token of the answer."""

    def read(self, answer: Any, attention_mask: Tensor) -> Tensor:
        return clear_padding(torch.stack([answer.start_logits, answer.end_logits], dim=-1), attention_mask)


def clear_padding(logits: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the logits with zeros at the padding. logits: [batch, seq, outputs]."""
    return logits.masked_fill(attention_mask.unsqueeze(-1) == 0, 0.0)


class ImageClassifier(WrappedModel):
    """pixel_values, [batch, channels, height, width] float32, to [batch, classes]."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=pixel_values).logits
        return logits


def wrap_encoder(model: Any, source: Mapping[str, Any]) -> nn.Module:
    """Wrap a bare encoder, or one tower of two, by what it reads."""
    if has_towers(model):
        return TextTower(model) if "embedder" in source else ImageTower(model)
    if "embedder" in source:
        return TextEmbedder(model, EmbedderConfig.model_validate(source["embedder"]))
    return ImageEmbedder(model)


WRAPPERS: dict[str, Callable[[Any, Mapping[str, Any]], nn.Module]] = {
    ENCODER: wrap_encoder,
    "AutoModelForSequenceClassification": lambda model, source: TextClassifier(model),
    "AutoModelForImageClassification": lambda model, source: ImageClassifier(model),
    "AutoModelForSemanticSegmentation": lambda model, source: ImageClassifier(model),
    "AutoModelForAudioClassification": lambda model, source: SpeechModel(model),
    SPEECH: lambda model, source: SpeechModel(model),
    "AutoModelForObjectDetection": lambda model, source: ObjectDetector(model),
    "AutoModelForTokenClassification": lambda model, source: TokenClassifier(model),
    "AutoModelForQuestionAnswering": lambda model, source: QuestionAnswerer(model),
    MASKED: lambda model, source: MaskedLanguageModel(model, int(source["mask_id"])),
    "AutoModelForCausalLM": lambda model, source: LanguageModel(model),
    "AutoModelForImageTextToText": lambda model, source: VisionLanguageModel(model),
    "AutoModelForSeq2SeqLM": lambda model, source: EncoderDecoder(model),
    "AutoModelForSpeechSeq2Seq": lambda model, source: SpeechWriter(model),
}
"""By Auto class, the module around its model. source: how to build the module, as `describe_source` gives it."""


def read_auto_class(source: Mapping[str, Any]) -> str:
    """Return the Auto class of a source, which may come from a file.

    Raises SourceError unless its task is registered: the address of a class would import whatever the file names.
    """
    if source["task"] not in registry.TASKS:
        raise SourceError(registry.describe_unknown("task", str(source["task"])))
    return str(resolve_task(source["task"]).auto_class)


def wrap(model: Any, source: Mapping[str, Any]) -> nn.Module:
    """Wrap a model of transformers, and let it keep no keys and values for a next call: there is none, and a block that
    is called again would find its own."""
    for config in (model.config, model.config.get_text_config()):
        if getattr(config, "use_cache", False):
            config.use_cache = False
    return WRAPPERS[read_auto_class(source)](model, source)


def build(source: Mapping[str, Any]) -> nn.Module:
    """Build the module of a source, with random weights.

    It is built in full, not on the meta device, so that buffers which are not saved hold what they should.
    """
    auto_class = read_auto_class(source)
    try:
        pooler = bool(source.get("pooler"))
        with quiet(), torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
            for name, content in {**source.get("code", {}), "config.json": json.dumps(source["config"])}.items():
                (Path(folder) / Path(name).name).write_text(content, encoding="utf-8")
            trust = "code" in source  # whoever opens a checkpoint with code has been asked
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
            model = model_class(config, auto_class).from_config(
                config,
                dtype=torch.float32,
                trust_remote_code=trust,
                **model_options(config, auto_class, pooler=pooler),
            )
    except (ValueError, KeyError, TypeError, RuntimeError, OSError) as error:
        raise SourceError(f"transformers {transformers.__version__} cannot build this model: {error}") from error
    return wrap(model, source)
