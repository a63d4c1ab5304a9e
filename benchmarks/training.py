"""What the benchmarks of training share: models made of a config alone, and combinations of techniques as data."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from laconic.config import NamedSettings
from laconic.models import builder, huggingface, wrappers
from laconic.models.model_folder import read_source_json
from train.planner.combinations import format_technique
from train.planner.meta_model import CONFIG, MetaModel, open_meta_model
from train.settings import Training

CNN = "digit_images:build"
ADAMW = {"adamw": {"lr": 1e-4, "weight_decay": 0.01}}
ROUNDED = {"adamw": {"lr": 1e-4, "weight_decay": 0.01, "stochastic_rounding": True}}

HOSTED = {"layerwise": {"rows": 2, "snapshots_on": "host"}}
DEFERRED = {"chunked-cross-entropy": {"defer": True, "chunk": 64}}
"""Chunks of 64 tokens, of which the small batches here have several."""

COMBINATIONS: tuple[tuple[tuple[Any, ...], Any], ...] = (
    ((), ADAMW),
    ((), {"adamw": {"implementation": "foreach"}}),
    ((), {"adamw": {"implementation": "loop"}}),
    ((), "sgd"),
    ((), {"sgd": {"momentum": 0.9}}),
    ((), "adamw-8bit"),
    ((), "adamw-4bit"),
    ((), "adafactor"),
    ((), "lion"),
    ((), "lamb"),
    ((), {"apollo": {"rank": 32}}),
    (("sdpa",), ADAMW),
    (("bf16",), ADAMW),
    (("fp16",), ADAMW),
    (("pure-bf16",), ROUNDED),
    (("inplace-activations",), ADAMW),
    (("gradient-checkpointing",), ADAMW),
    (({"gradient-checkpointing": {"policy": "selective"}},), ADAMW),
    (({"gradient-accumulation": {"rows": 2}},), ADAMW),
    (("chunked-cross-entropy",), ADAMW),
    (("optimizer-in-backward",), ADAMW),
    (({"activation-offload": {"min_bytes": 65536}},), ADAMW),
    (({"activation-offload": {"min_bytes": 65536, "destination": "disk"}},), ADAMW),
    (({"layerwise": {"rows": 2}},), ADAMW),
    ((({"layerwise": {"rows": 2, "snapshots": 3}}), "optimizer-in-backward"), ADAMW),
    ((HOSTED, {"host-weights": {"dtype": "fp32"}}), ADAMW),
    ((HOSTED, {"host-weights": {"dtype": "bf16"}}), ADAMW),
    (("sdpa", HOSTED, {"host-weights": {"dtype": "fp32"}}, {"chunked-cross-entropy": {"chunk": 64}}), ADAMW),
    (("sdpa", HOSTED, {"host-weights": {"dtype": "fp32"}}, DEFERRED), ADAMW),
    (("lora",), ADAMW),
    (({"lora": {"base_dtype": "bfloat16"}}, "bf16", "gradient-checkpointing"), ADAMW),
    (("qlora",), ADAMW),
    (("qlora", "bf16", "gradient-checkpointing", {"gradient-accumulation": {"rows": 2}}), ADAMW),
    (("sdpa", "gradient-checkpointing", {"gradient-accumulation": {"rows": 2}}), ADAMW),
    (("sdpa", "chunked-cross-entropy", "gradient-checkpointing", {"gradient-accumulation": {"rows": 2}}), ADAMW),
    (("sdpa", {"chunked-cross-entropy": {"defer": True}}, "gradient-checkpointing", "optimizer-in-backward"), ADAMW),
    (("bf16", "gradient-checkpointing"), "adamw-8bit"),
    (("pure-bf16", "gradient-checkpointing", "optimizer-in-backward"), {"adafactor": {"stochastic_rounding": True}}),
)
"""Techniques and the optimizer, as a recipe writes them."""


def spoken(training: Training) -> str:
    """The techniques and the optimizer, as people say them."""
    default = training.optimizer.name == "adamw" and training.optimizer.config.get("implementation") is None
    optimizer = training.optimizer.name if default else format_technique(training.optimizer)
    return " + ".join([*map(format_technique, training.techniques), optimizer])


def settings(choice: Iterable[Any], optimizer: Any, batch: int) -> Training:
    """Settings of training with this combination; the gradient is clipped where that is possible."""
    techniques = tuple(NamedSettings.model_validate(each) for each in choice)
    clip = None if any(named.name == "optimizer-in-backward" for named in techniques) else 1.0
    return Training(
        batch_size=batch, techniques=techniques, optimizer=NamedSettings.model_validate(optimizer), max_grad_norm=clip
    )


@dataclass(frozen=True, eq=False)
class Model:
    """A model that a config or a builder makes. source: how to build it. length: tokens of a row."""

    name: str
    subject: MetaModel
    source: dict[str, Any]
    batch: int
    length: int

    def real(self) -> nn.Module:
        """The module, with random weights."""
        build = wrappers.build if self.source["kind"] == "huggingface" else builder.build
        return eager(build(self.source))

    def combinations(self) -> Iterator[Training]:
        """All of COMBINATIONS; the model may have no place for some."""
        for choice, optimizer in COMBINATIONS:
            yield settings(choice, optimizer, self.batch)


def from_config(name: str, folder: Path, config: Any, kind: str, task: str, batch: int, length: int = 1) -> Model:
    """A model of transformers, from its config alone. kind: the class of transformers."""
    config.architectures = [kind]
    config.save_pretrained(folder)
    source = huggingface.describe_source(folder, read_source_json(folder / CONFIG), task)
    subject = open_meta_model(folder, task=task)
    eager(subject.module)
    return Model(name, subject, source, batch, length)


def eager(module: nn.Module) -> nn.Module:
    """The module with attention in several operations, where it has attention: what `sdpa` is measured against."""
    model: Any = next((part for part in module.modules() if hasattr(part, "set_attn_implementation")), None)
    if model is not None:
        model.set_attn_implementation("eager")
    return module


def gpt(folder: Path, width: int, layers: int, heads: int, words: int, batch: int, length: int) -> Model:
    """A GPT-2 without dropout, with GELU as one operation."""
    config = transformers.GPT2Config(
        n_embd=width, n_layer=layers, n_head=heads, vocab_size=words, n_positions=max(length, 1024),
        activation_function="gelu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    name = f"gpt-{width}x{layers}"
    return from_config("GPT-2", folder / name, config, "GPT2LMHeadModel", "text-generation", batch, length)


def llama(folder: Path, batch: int, length: int) -> Model:
    """The shape of Llama 3 8B."""
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip
    return from_config("Llama 8 B", folder / "llama", config, "LlamaForCausalLM", "text-generation", batch, length)


def minilm(folder: Path, batch: int, length: int) -> Model:
    """A classifier of four classes, in the shape of all-MiniLM-L6-v2."""
    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, num_labels=4
    )
    kind = "BertForSequenceClassification"
    return from_config("MiniLM", folder / "minilm", config, kind, "text-classification", batch, length)


def vit(folder: Path, batch: int) -> Model:
    """A small ViT on images of 64 x 64."""
    config = transformers.ViTConfig(
        hidden_size=192, num_hidden_layers=8, num_attention_heads=3, intermediate_size=768, image_size=64, patch_size=8
    )
    kind = "ViTForImageClassification"
    return from_config("ViT", folder / "vit", config, kind, "image-classification", batch)


def cnn(batch: int) -> Model:
    """The ResNet of digit_images.py."""
    subject = open_meta_model(Path(CNN), builder=CNN, task="image-classification")
    return Model("ResNet", subject, builder.describe_source(CNN, {}), batch, 1)
