"""The combinations of techniques that the planner tries, and their order: as `laconic plan` lists them."""

import pytest
import torch
import transformers

from train.planner.combinations import list_combinations
from train.planner.meta_model import open_meta_model
from train.settings import Training

CPU = torch.device("cpu")
SMALL_GPT = [
    "adamw",
    "sdpa + chunked-cross-entropy + adamw",
    "sdpa + chunked-cross-entropy + gradient-accumulation(rows=2) + adamw",
    "sdpa + chunked-cross-entropy + gradient-checkpointing(policy=selective) + adamw",
    "sdpa + chunked-cross-entropy + gradient-checkpointing(policy=selective) + gradient-accumulation(rows=2) + adamw",
    "sdpa + chunked-cross-entropy + gradient-checkpointing + adamw",
    "sdpa + chunked-cross-entropy + gradient-checkpointing + gradient-accumulation(rows=2) + adamw",
    "sdpa + chunked-cross-entropy + bf16 + adamw",
    "sdpa + chunked-cross-entropy + bf16 + gradient-accumulation(rows=2) + adamw",
    "sdpa + chunked-cross-entropy + bf16 + gradient-checkpointing(policy=selective) + adamw",
    "sdpa + chunked-cross-entropy + bf16"
    " + gradient-checkpointing(policy=selective) + gradient-accumulation(rows=2) + adamw",
    "sdpa + chunked-cross-entropy + bf16 + gradient-checkpointing + adamw",
    "sdpa + chunked-cross-entropy + bf16 + gradient-checkpointing + adamw-8bit",
    "sdpa + chunked-cross-entropy + bf16 + gradient-checkpointing + gradient-accumulation(rows=2) + adamw",
    "sdpa + chunked-cross-entropy + bf16 + gradient-checkpointing + gradient-accumulation(rows=2) + adamw-8bit",
    "sdpa + chunked-cross-entropy + gradient-checkpointing + optimizer-in-backward + adamw",
    "sdpa + chunked-cross-entropy + bf16 + gradient-checkpointing + optimizer-in-backward + adamw",
    "sdpa + layerwise(rows=1, snapshots=4)"
    " + chunked-cross-entropy(defer=True, chunk=256) + optimizer-in-backward + adamw",
    "sdpa + chunked-cross-entropy + layerwise(rows=1) + bf16 + optimizer-in-backward + adamw",
    "sdpa + layerwise(rows=1, snapshots_on=host)"
    " + chunked-cross-entropy(defer=True, chunk=256) + host-weights(dtype=fp32) + adamw",
    "sdpa + layerwise(rows=1, snapshots_on=host)"
    " + chunked-cross-entropy(defer=True, chunk=256) + host-weights(dtype=bf16) + adamw",
    "sdpa + chunked-cross-entropy + lora(base_dtype=bfloat16) + bf16 + adamw",
    "sdpa + chunked-cross-entropy + lora(base_dtype=bfloat16)"
    " + bf16 + gradient-checkpointing + gradient-accumulation + adamw",
    "sdpa + qlora + bf16 + gradient-checkpointing + gradient-accumulation + chunked-cross-entropy(chunk=128) + adamw",
]
MINILM = [
    "adamw",
    "sdpa + adamw",
    "sdpa + gradient-checkpointing(policy=selective) + adamw",
    "sdpa + gradient-checkpointing + adamw",
    "sdpa + bf16 + adamw",
    "sdpa + bf16 + gradient-checkpointing(policy=selective) + adamw",
    "sdpa + bf16 + gradient-checkpointing + adamw",
    "sdpa + bf16 + gradient-checkpointing + adamw-8bit",
    "sdpa + gradient-checkpointing + optimizer-in-backward + adamw",
    "sdpa + bf16 + gradient-checkpointing + optimizer-in-backward + adamw",
    "sdpa + layerwise(rows=1, snapshots=4) + optimizer-in-backward + adamw",
    "sdpa + layerwise(rows=1) + bf16 + optimizer-in-backward + adamw",
    "sdpa + layerwise(rows=1, snapshots_on=host) + host-weights(dtype=fp32) + adamw",
    "sdpa + layerwise(rows=1, snapshots_on=host) + host-weights(dtype=bf16) + adamw",
    "sdpa + lora(base_dtype=bfloat16) + bf16 + adamw",
]  # qlora is not among them: MiniLM's task takes no batch in parts
UNTIED = [
    "sdpa + layerwise(rows=1, snapshots=4) + chunked-cross-entropy(chunk=256) + optimizer-in-backward + adamw",
    "sdpa + layerwise(rows=1, snapshots_on=host) + chunked-cross-entropy(chunk=256) + host-weights(dtype=fp32) + adamw",
]
GPT = transformers.GPT2Config(
    vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64, architectures=["GPT2LMHeadModel"]
)
BERT = transformers.BertConfig(
    vocab_size=40, hidden_size=48, num_hidden_layers=6, num_attention_heads=12, intermediate_size=96,
    architectures=["BertModel"],
)  # fmt: skip


def names(folder, config, training=None, task=None, device=CPU):
    config.save_pretrained(folder)
    found = list_combinations(open_meta_model(folder, task=task), training or Training(batch_size=16), device)
    return [each.name for each in found]


@pytest.mark.parametrize(
    ("config", "task", "expected"), [(GPT, None, SMALL_GPT), (BERT, "text-embedding", MINILM)], ids=["gpt", "minilm"]
)
def test_the_planner_tries_these_combinations_in_this_order(tmp_path, config, task, expected):
    assert names(tmp_path, config, task=task) == expected


def test_a_head_with_weights_of_its_own_gets_its_gradient_at_once(tmp_path):
    config = transformers.GPT2Config(**{**GPT.to_dict(), "tie_word_embeddings": False})
    found = names(tmp_path, config)
    assert set(UNTIED) <= set(found)
    assert not [name for name in found if "defer" in name]


def test_a_gpu_without_bf16_is_offered_fp16(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    found = names(tmp_path, GPT, device=torch.device("cuda"))
    assert "sdpa + chunked-cross-entropy + fp16 + gradient-checkpointing + adamw" in found
    assert "sdpa + chunked-cross-entropy + bf16 + gradient-checkpointing + adamw" not in found
