"""Language models that are quantized a layer at a time: the same weights as with the whole model in memory, proven,
resumed at its layer, read by transformers."""

import json
import os
import signal
import sys

import chat_models
import numpy as np
import pytest
import torch
import transformers
from language_models import save
from safetensors.torch import load_file

from compress.out_of_core.layer_loop import LayerLoop
from compress.out_of_core.quantized_checkpoint import quantize_checkpoint
from laconic.cache import Cache
from laconic.models.source_loading import load_source
from laconic.models.sharded_model import open_sharded_model
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe

QUIET = Steps(quiet=True)
GPTQ = {"quantize.gptq": {"group_size": 32, "mixed_precision": False, "samples": 6}}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A small Llama in BF16 and in several shards, with the tokenizer of the chat model, and texts."""
    folder = tmp_path_factory.mktemp("sharded")
    save_llama(folder / "model")
    rows = [{"text": f"row {number}: " + "one two three four five six seven " * 4} for number in range(40)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def save_llama(folder):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(chat_models.make_config())
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.bfloat16().save_pretrained(folder, max_shard_size="60KB")
    chat_models.make_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"pad_token": "<|pad|>", "eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def make_recipe(source, stage=GPTQ, **keys):
    return Recipe.parse({
        "source": str(source / "model"), "data": str(source / "texts.jsonl"), "task": "text-generation",
        "to": "checkpoint", "stages": [stage], **keys,
    })  # fmt: skip


def read_bytes(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


@pytest.fixture(scope="module")
def written(source):
    return quantize_checkpoint(make_recipe(source), source / "out", steps=QUIET, cache=Cache(source / "cache"))


def test_x(source, written):
    print(json.dumps(written.report, indent=1)[:3000])
