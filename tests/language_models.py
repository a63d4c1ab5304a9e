"""Small language models of many families, with random weights, and the files of their decoders."""

import shutil
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import transformers
from filelock import FileLock

from export.placements.split_decoder import split_decoder
from export.sources import capture_graph
from laconic.cache import Cache
from laconic.models.source import CheckpointSource
from laconic.models.source_loading import load_source

WINDOW = 8
"""The sliding window of those families that have one: prompts are longer."""
TOKENS = {"vocab_size": 40, "bos_token_id": 2, "eos_token_id": 3}
SHAPE = TOKENS | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}
GROUPED = SHAPE | {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
GPT2 = TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "tie_word_embeddings": False}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt2": (transformers.GPT2LMHeadModel, GPT2),
    "llama": (transformers.LlamaForCausalLM, GROUPED),
    "qwen3": (transformers.Qwen3ForCausalLM, GROUPED),
    "mistral": (transformers.MistralForCausalLM, GROUPED | {"sliding_window": WINDOW}),
    "gemma2": (transformers.Gemma2ForCausalLM, GROUPED | {"sliding_window": WINDOW}),
    "opt": (transformers.OPTForCausalLM, SHAPE | {"ffn_dim": 64, "word_embed_proj_dim": 32, "pad_token_id": 0}),
    "mixtral": (transformers.MixtralForCausalLM, GROUPED | {"num_local_experts": 4}),
}


MORE = {
    "bloom": (transformers.BloomForCausalLM, TOKENS | {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "gemma3": (
        transformers.Gemma3ForCausalLM,
        GROUPED | {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "openai-gpt": (transformers.OpenAIGPTLMHeadModel, GPT2 | {"n_layer": 1}),
    "wide_llama": (transformers.LlamaForCausalLM, GROUPED | {"head_dim": 64}),
}
"""Families for engines that write alone, and one without a cache of keys and values, which none writes with."""
KEPT = ("llama", "gemma2", "opt")
"""Families that take all paths: heads in groups; windows in some layers, and caps; absolute positions. `make test`
leaves out the others, each of whose graphs takes as long to capture."""


def mark_swept(*names: str) -> list[Any]:
    """The names of families as parameters of a fixture."""
    return [name if name in KEPT else pytest.param(name, marks=pytest.mark.sweep) for name in names]


def save(folder: Path, name: str) -> Path:
    """A folder of a family, with random weights large enough that the next token depends on those before."""
    kind, settings = (FAMILIES | MORE)[name]
    torch.manual_seed(1)
    model = kind(kind.config_class(**settings))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    return models.save_transformer(folder, model)


def open_decoder(root: Path, name: str) -> tuple[Path, Path]:
    """The folder of a family and the file of its decoder, made once in a run by whichever process asks first."""
    folder = root / name
    decoder = folder / "decoder" / "model.onnx"
    with FileLock(root / f"{name}.decoder.lock"):
        if not decoder.exists():
            checkpoint = load_source(save(folder / "family", name), task="text-generation")
            graph = capture_graph(CheckpointSource.of(checkpoint), Cache(root / "cache"))
            making = folder / "making"
            making.mkdir()
            shutil.copy(graph.path, making / decoder.name)
            split_decoder(making / decoder.name)
            making.rename(decoder.parent)
    return folder / "family", decoder
