"""Tiny checkpoints of many families: real structure, random weights, the files that save_pretrained writes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
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

    def write(self, folder: Path) -> Path:
        """Write the checkpoint's folder, whose weights come from a fixed seed."""
        torch.manual_seed(0)
        labels = {"id2label": dict(enumerate(CLASSES)), "label2id": {name: i for i, name in enumerate(CLASSES)}}
        name = {"Gemma3": "Gemma3Text"}.get(self.config, self.config)
        config = getattr(transformers, f"{name}Config")(
            **self.settings, **(labels if self.head.endswith("Classification") else {})
        )
        kind = getattr(transformers, f"{self.config}{self.head}")
        model = sharpen(kind(config).eval())
        model.save_pretrained(folder)
        if self.processor:
            getattr(transformers, self.processor)(**(self.pixels or {})).save_pretrained(folder)
        else:
            save_tokenizer(folder)
        return folder


def sharpen(model: Any) -> Any:
    """Draw weights of the width that keeps values apart: as transformers draws them, all classes are near a tie."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                fan_in = parameter[0].numel()
                nn.init.normal_(parameter, std=1 / fan_in**0.5)
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


def write_texts(path: Path) -> Path:
    """Texts of random words, with a class each."""
    rng = np.random.default_rng(0)
    rows = ["text,label"]
    for _ in range(SAMPLES):
        rows.append(f"{' '.join(rng.choice(WORDS, rng.integers(3, 30)))},{rng.choice(CLASSES)}")
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def write_images(folder: Path) -> Path:
    """Images with edges and colours, in a folder for each class."""
    rng = np.random.default_rng(0)
    for number in range(SAMPLES):
        tiles = rng.integers(0, 256, (rng.integers(2, 9), rng.integers(2, 9), 3), np.uint8)
        path = folder / CLASSES[number % 3] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(tiles).resize((90, 80), Image.Resampling.BICUBIC).save(path)
    return folder


VOCABULARY = len(SPECIAL) + len(WORDS)
IDS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
BERT: dict[str, Any] = IDS | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 66,
}
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


def text(config: str, head: str = CLASSIFIER, /, **settings: Any) -> Family:
    """A family that reads texts."""
    return Family(config, head, settings)


def image(config: str, processor: str, pixels: Mapping[str, Any] = SQUARE, /, **settings: Any) -> Family:
    """A family that reads images."""
    return Family(config, IMAGES, settings, processor, pixels)


FAMILIES: dict[str, Family] = {
    "BERT": text("Bert", **BERT),
    "RoBERTa": text("Roberta", **BERT),
    "XLM-R": text("XLMRoberta", **BERT),
    "DistilBERT": text("DistilBert", **IDS, dim=64, n_layers=2, n_heads=4, hidden_dim=128, max_position_embeddings=64),
    "DistilBERT embedder": text("DistilBert", BARE, **IDS, dim=64, n_layers=2, n_heads=4, hidden_dim=128),
    "ELECTRA": text("Electra", **BERT, embedding_size=32),
    "ALBERT": text("Albert", **BERT, embedding_size=32),
    "MPNet": text("MPNet", **BERT),
    "DeBERTa-v2": text(
        "DebertaV2", **BERT, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=16,
        type_vocab_size=0,
    ),
    "ModernBERT": text("ModernBert", **BERT, cls_token_id=2, sep_token_id=3),
    "CamemBERT": text("Camembert", **BERT),
    "MobileBERT": text("MobileBert", **BERT, embedding_size=32, intra_bottleneck_size=32, true_hidden_size=32),
    "SqueezeBERT": text("SqueezeBert", **BERT, embedding_size=64),
    "ConvBERT": text("ConvBert", **BERT, embedding_size=32),
    "RoFormer": text("RoFormer", **BERT),
    "Nystromformer": text("Nystromformer", **BERT, num_landmarks=4),
    "FNet": text("FNet", **BERT),
    "Funnel": text(
        "Funnel", **IDS, d_model=64, n_head=4, d_head=16, d_inner=128, block_sizes=[1, 1], num_decoder_layers=1
    ),
    "XLNet": text("XLNet", **IDS, d_model=64, n_layer=2, n_head=4, d_inner=128),
    "Longformer": text("Longformer", **BERT, attention_window=8),
    "BigBird": text("BigBird", **BERT, attention_type="original_full"),
    "BART": text(
        "Bart", **IDS, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=64,
        decoder_start_token_id=3,
    ),
    "T5 encoder": text("T5", "EncoderModel", **IDS, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4),
    "CLIP text": text("CLIPText", BARE, **BERT),
    "GPT-2": text("GPT2", "LMHeadModel", **IDS, n_embd=64, n_layer=2, n_head=4, n_positions=64),
    "GPT-2 classifier": text("GPT2", **IDS, n_embd=64, n_layer=2, n_head=4, n_positions=64),
    "GPT-NeoX": text("GPTNeoX", CAUSAL, **BERT),
    "GPT-Neo": text(
        "GPTNeo", CAUSAL, **IDS, hidden_size=64, num_layers=2, num_heads=4, max_position_embeddings=64,
        attention_types=[[["global", "local"], 1]],
    ),
    "OPT": text("OPT", CAUSAL, **IDS, hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4),
    "Bloom": text("Bloom", CAUSAL, **IDS, hidden_size=64, n_layer=2, n_head=4),
    "Llama": text("Llama", CAUSAL, **DECODER),
    "Llama classifier": text("Llama", **DECODER),
    "Mistral": text("Mistral", CAUSAL, **DECODER),
    "Mixtral": text("Mixtral", CAUSAL, **DECODER, num_local_experts=4),
    "Qwen2": text("Qwen2", CAUSAL, **DECODER),
    "Qwen3": text("Qwen3", CAUSAL, **DECODER, head_dim=16),
    "Gemma": text("Gemma", CAUSAL, **DECODER, head_dim=16),
    "Gemma 3": text("Gemma3", CAUSAL, **DECODER, head_dim=16),
    "Phi": text("Phi", CAUSAL, **DECODER),
    "Phi-3": text("Phi3", CAUSAL, **DECODER),
    "Mamba": text("Mamba", CAUSAL, **IDS, hidden_size=64, state_size=8, num_hidden_layers=2),
    "ViT": image("ViT", "ViTImageProcessorPil", **VIT),
    "DeiT": image("DeiT", "DeiTImageProcessorPil", SQUARE | {"crop_size": SQUARE["size"]}, **VIT),
    "BEiT": image("Beit", "BeitImageProcessorPil", SQUARE | {"crop_size": SQUARE["size"]}, **VIT),
    "DINOv2": image(
        "Dinov2", "BitImageProcessorPil", {"size": {"shortest_edge": 72}, "crop_size": SQUARE["size"]}, **VIT
    ),
    "Swin": image(
        "Swin", "ViTImageProcessorPil", image_size=SIZE, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4],
        window_size=4,
    ),
    "ResNet": image(
        "ResNet", "ConvNextImageProcessorPil", {"size": {"shortest_edge": SIZE}}, embedding_size=16,
        hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic",
    ),
    "RegNet": image(
        "RegNet", "ConvNextImageProcessorPil", {"size": {"shortest_edge": SIZE}}, embedding_size=16,
        hidden_sizes=[16, 32], depths=[1, 1], groups_width=8,
    ),
    "ConvNeXt": image(
        "ConvNext", "ConvNextImageProcessorPil", {"size": {"shortest_edge": SIZE}}, hidden_sizes=[16, 32],
        depths=[1, 1], num_stages=2, image_size=SIZE,
    ),
    "ConvNeXt V2": image(
        "ConvNextV2", "ConvNextImageProcessorPil", {"size": {"shortest_edge": SIZE}}, hidden_sizes=[16, 32],
        depths=[1, 1], num_stages=2, image_size=SIZE,
    ),
    "MobileNet V1": image(
        "MobileNetV1", "MobileNetV1ImageProcessorPil", {"size": {"shortest_edge": 72}, "crop_size": SQUARE["size"]},
        depth_multiplier=0.25,
    ),
    "MobileNet V2": image(
        "MobileNetV2", "MobileNetV2ImageProcessorPil", {"size": {"shortest_edge": 72}, "crop_size": SQUARE["size"]},
        depth_multiplier=0.25,
    ),
    "EfficientNet": image(
        "EfficientNet", "EfficientNetImageProcessorPil", image_size=SIZE, width_coefficient=0.25,
        depth_coefficient=0.25, hidden_dim=320, dropout_rate=0.0,
    ),
    "MobileViT": image(
        "MobileViT", "MobileViTImageProcessorPil", {"size": {"shortest_edge": 72}, "crop_size": SQUARE["size"]},
        image_size=SIZE, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64],
    ),
    "MobileViT V2": image(
        "MobileViTV2", "MobileViTImageProcessorPil", {"size": {"shortest_edge": 72}, "crop_size": SQUARE["size"]},
        image_size=SIZE, width_multiplier=0.25,
    ),
    "LeViT": image(
        "Levit", "LevitImageProcessorPil", image_size=224, hidden_sizes=[32, 48, 64], num_attention_heads=[2, 3, 4],
        key_dim=[8, 8, 8], depths=[1, 1, 1],
    ),
    "PoolFormer": image(
        "PoolFormer", "PoolFormerImageProcessorPil", {"size": {"shortest_edge": SIZE}, "crop_size": SQUARE["size"]},
        hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
    ),
    "PVT": image("Pvt", "PvtImageProcessorPil", image_size=SIZE, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
    ),
    "SegFormer": image(
        "Segformer", "SegformerImageProcessorPil", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
    ),
    "CvT": image(
        "Cvt", "ConvNextImageProcessorPil", {"size": {"shortest_edge": SIZE}}, embed_dim=[8, 16, 32],
        num_heads=[1, 2, 4], depth=[1, 1, 1], image_size=SIZE,
    ),
    "BiT": image("Bit", "BitImageProcessorPil", {"size": {"shortest_edge": 72}, "crop_size": SQUARE["size"]},
        embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], num_groups=8,
    ),
    "FocalNet": image(
        "FocalNet", "BitImageProcessorPil", {"size": {"shortest_edge": 72}, "crop_size": SQUARE["size"]},
        image_size=SIZE, embed_dim=16, depths=[1, 1], hidden_sizes=[16, 32],
    ),
}  # fmt: skip
