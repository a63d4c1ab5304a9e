"""A tiny checkpoint of a family of transformers: real structure, random weights, the files of save_pretrained."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn

WORDS = [f"{first}{second}{third}" for first in "bdfgklmn" for second in "aeiou" for third in "lnrst"]
SPECIAL = ["<pad>", "<unk>", "<cls>", "<sep>", "<mask>"]
SIZE = 64
"""Height and width of an image."""
CLASSES = ("cat", "dog", "fish")
LETTERS = ("a", "b", "c")
"""Classes that are one token each where tokens are bytes."""
SAMPLES = 120


@dataclass(frozen=True)
class Family:
    """A family: its config class and settings; the model class, by the ending of its name; what its samples are.

    processor: the image processor that saves its settings beside the model, with the settings that differ from its own.
    """

    config: str
    head: str
    settings: Mapping[str, Any]
    processor: str | None = None
    pixels: Mapping[str, Any] | None = None

    @property
    def reads(self) -> str:
        """What its samples are: texts, images or sounds."""
        return "texts" if self.processor is None else "sounds" if self.processor in EXTRACTORS else "images"

    @property
    def writes(self) -> bool:
        """Whether it is an encoder-decoder that writes a text."""
        return self.head in (WRITER, TRANSLATOR)

    @property
    def reads_bytes(self) -> bool:
        """Whether a token is a byte."""
        return self.config in BYTE_LEVEL

    def write(self, folder: Path) -> Path:
        """Write the checkpoint's folder, whose weights come from a fixed seed."""
        torch.manual_seed(0)
        labels = {"id2label": dict(enumerate(CLASSES)), "label2id": {name: i for i, name in enumerate(CLASSES)}}
        name = {"Gemma3": "Gemma3Text"}.get(self.config, self.config)
        answers = self.head.endswith(("Classification", "Detection", "Segmentation"))
        config = getattr(transformers, f"{name}Config")(**self.settings, **(labels if answers else {}))
        kind = getattr(transformers, f"{self.config}{self.head}")
        model = sharpen(kind(config).eval())
        if self.writes:
            model.generation_config.update(max_length=MAX_LENGTH)
        model.save_pretrained(folder)
        if self.head == CTC:
            save_characters(folder)
        if self.processor == SPECTROGRAM:
            save_speech_tokenizer(folder)
        if self.processor:
            getattr(transformers, self.processor)(**(self.pixels or {})).save_pretrained(folder)
        else:
            (save_byte_tokenizer if self.reads_bytes else save_tokenizer)(folder)
        return folder


def sharpen(model: Any) -> Any:
    """Draw weights of the width that keeps values apart: as transformers draws them, all classes are near a tie."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                nn.init.normal_(parameter, std=max(parameter[0].numel(), 1) ** -0.5)
            elif "norm" not in name.lower() and name.endswith("bias"):
                nn.init.normal_(parameter, std=0.05)
    return model


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of whole words, as BERT joins one text or two."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="<cls> $A <sep>", pair="<cls> $A <sep> $B:1 <sep>:1", special_tokens=[("<cls>", 2), ("<sep>", 3)]
    )
    names = {"pad": "<pad>", "unk": "<unk>", "cls": "<cls>", "sep": "<sep>", "mask": "<mask>"}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, **{f"{key}_token": value for key, value in names.items()}, model_max_length=64
    ).save_pretrained(folder)


def save_byte_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes, of the class that transformers takes for models of these types."""
    tokens = ["<pad>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names = {"pad_token": "<pad>", "eos_token": "<pad>", "unk_token": "<unk>"}
    transformers.Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)}, merges=[], model_max_length=64, **names
    ).save_pretrained(folder)


def save_speech_tokenizer(folder: Path) -> None:
    """The same of Whisper, with the tokens that begin and end an answer."""
    letters = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = transformers.WhisperTokenizer(vocab=letters, merges=[])
    made.add_special_tokens({"additional_special_tokens": ["<|startoftranscript|>"]})
    made.save_pretrained(folder)


def save_characters(folder: Path) -> None:
    """A vocabulary of characters, as models have it that write what is said."""
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(CHARACTERS)}))
    transformers.Wav2Vec2CTCTokenizer(str(folder / "vocab.json"), bos_token=None, eos_token=None).save_pretrained(
        folder
    )


def write_texts(path: Path, classes: Sequence[str]) -> Path:
    """Texts of random words, with a class each."""
    rng = np.random.default_rng(0)
    rows = ["text,label"]
    for _ in range(SAMPLES):
        rows.append(f"{' '.join(rng.choice(WORDS, rng.integers(3, 30)))},{rng.choice(classes)}")
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def write_images(folder: Path, *, classes: bool = True) -> Path:
    """Images with edges and colours, in a folder for each class, or all in one."""
    rng = np.random.default_rng(0)
    for number in range(SAMPLES):
        tiles = rng.integers(0, 256, (rng.integers(2, 9), rng.integers(2, 9), 3), np.uint8)
        path = folder / (CLASSES[number % 3] if classes else ".") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(tiles).resize((90, 80), Image.Resampling.BICUBIC).save(path)
    return folder


def write_sounds(folder: Path, *, classes: bool) -> Path:
    """Tones with noise, of several lengths, in a folder for each class, or all in one."""
    rng = np.random.default_rng(0)
    for number in range(SAMPLES):
        time = np.arange(rng.integers(RATE // 2, RATE)) / RATE
        tone = 0.3 * np.sin(2 * np.pi * rng.uniform(100, 3000) * time) + 0.05 * rng.standard_normal(len(time))
        path = folder / (CLASSES[number % 3] if classes else ".") / f"{number}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, tone, RATE)
    return folder


BYTE_LEVEL = ("Qwen2", "Qwen2Moe")
"""Configs of models whose tokenizer transformers makes of the model's type, whatever the folder says."""
VOCABULARY = len(SPECIAL) + len(WORDS)
IDS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
BERT: dict[str, Any] = IDS | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 66,
}
BYTES = {"vocab_size": 258, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
DECODER: dict[str, Any] = BERT | {"num_key_value_heads": 2}
VIT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": SIZE,
    "patch_size": 16,
}
SQUARE = {"size": {"height": SIZE, "width": SIZE}}
CLASSIFIER, IMAGES, CAUSAL, BARE = "ForSequenceClassification", "ForImageClassification", "ForCausalLM", "Model"
WRITER, TRANSLATOR = "ForConditionalGeneration", "MTModel"
MAX_LENGTH = 24
"""Of what a model writes, in tokens."""
CTC, EXTRACTOR, SPECTROGRAM = "ForCTC", "Wav2Vec2FeatureExtractor", "WhisperFeatureExtractor"
EXTRACTORS = (EXTRACTOR, SPECTROGRAM)
CHARACTERS = ("<pad>", "<unk>", "|", *"ETAOINSHRDLU")
RATE = 16_000
"""Samples of a second of sound."""
WAV2VEC: dict[str, Any] = {
    "vocab_size": len(CHARACTERS),
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "conv_dim": (32, 32, 64),
    "conv_kernel": (10, 8, 4),
    "conv_stride": (5, 8, 4),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}


def text(config: str, head: str = CLASSIFIER, /, **settings: Any) -> Family:
    """A family that reads texts."""
    return Family(config, head, settings)


def image(
    config: str, processor: str, pixels: Mapping[str, Any] = SQUARE, /, head: str = IMAGES, **settings: Any
) -> Family:
    """A family that reads images."""
    return Family(config, head, settings, processor, pixels)


def sound(config: str, head: str = CTC, /, norm: str = "group", **settings: Any) -> Family:
    """A family that reads sounds. norm: of the feature encoder; with a norm of each layer, a mask tells the padding."""
    own = WAV2VEC | {"feat_extract_norm": norm, "do_stable_layer_norm": norm == "layer"}
    return Family(config, head, own | settings, EXTRACTOR, {"return_attention_mask": norm == "layer"})
