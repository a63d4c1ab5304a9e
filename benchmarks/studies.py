"""Three trainings that take a minute at most, for comparing techniques by what is learned."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import transformers
from digit_images import Residual
from inputs import CLASSES, learn_tokenizer, model_folder, read_classes, texts
from sklearn.datasets import load_digits
from torch import nn
from training import eager

from laconic.config import NamedSettings
from laconic.data.dataset import Dataset, split
from laconic.data.reader import make_dataset
from laconic.models.checkpoint import Checkpoint
from laconic.models.language_model import LanguageModel
from laconic.tasks.generation_settings import GenerationSettings
from laconic.tasks.image_classification import ImageClassification
from laconic.tasks.image_preprocess import ImagePreprocess
from laconic.tasks.text_generation import TextGeneration, describe_inputs
from laconic.tensor import TensorSpec
from train.data.loader_settings import LoaderSettings
from train.finetune.head import with_labels
from train.settings import Training

HELD = 0.2
CUT = 48
WORDS, WIDTH, LENGTH = 512, 96, 64
"""Of language models: the vocabulary, the width of their layers, and the tokens of a text."""


@dataclass(frozen=True, eq=False)
class Study:
    """start: the checkpoint that is trained, by the seed. few: steps that are enough to see whether losses are the
    same, where all take long."""

    name: str
    start: Callable[[int], Checkpoint]
    learn: Dataset
    held: Dataset
    training: Training
    few: int | None = None


def still(module: nn.Module) -> nn.Module:
    """Without dropout, which techniques draw in another order; with attention in several operations."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return eager(module)


def training(steps: int, batch: int, lr: float) -> Training:
    """AdamW at a constant rate, so that a few steps are the first of many."""
    return Training(
        steps=steps,
        batch_size=batch,
        max_grad_norm=None,
        optimizer=NamedSettings(name="adamw", config={"lr": lr, "weight_decay": 0.01}),
        schedule=NamedSettings(name="constant"),
        loader=LoaderSettings(workers=0),
        snapshot_every=10**6,
    )


def make_task(lines: list[str], length: int) -> TextGeneration:
    """Make the task of a language model of these texts, with WORDS tokens, for `length` of them."""
    return TextGeneration(
        learn_tokenizer(lines, WORDS),
        describe_inputs(length, None),
        max_tokens=length,
        pad_id=0,
        start_id=0,
        generation=GenerationSettings(decoder_start_token_id=0),
    )


def make_gpt2(layers: int, length: int) -> LanguageModel:
    """Make a small GPT-2 without dropout."""
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=WIDTH, n_layer=layers, n_head=4, n_positions=length, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return LanguageModel(transformers.GPT2LMHeadModel(config))


def minilm(folder: Path) -> Study:
    """all-MiniLM-L6-v2 with a new head: from which package a docstring is."""
    source = model_folder(folder)
    pairs = read_classes(folder)

    @cache
    def opened(seed: int) -> Checkpoint:
        return with_labels(source, "text-classification", CLASSES, seed=seed)

    def start(seed: int) -> Checkpoint:
        opened.cache_clear()
        checkpoint = opened(seed)
        checkpoint.task.tokenizer.enable_truncation(CUT)  # type: ignore[attr-defined]
        still(checkpoint.module)
        return checkpoint

    dataset = make_dataset([text for text, _ in pairs], start(0).task, labels=[label for _, label in pairs])
    parts = split(dataset, {"learn": 1 - HELD, "held": HELD})
    return Study("MiniLM", start, parts["learn"], parts["held"], training(60, 16, 1e-4), few=20)


def network(width: int = 32) -> nn.Module:
    """[batch, 1, 8, 8] to [batch, 10], three residual blocks. Narrower ones have no moments that 8 bits would hold."""
    blocks = nn.Sequential(*(Residual(width) for _ in range(3)))
    stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    return nn.Sequential(stem, blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def digits() -> Study:
    """A small ResNet reads scikit-learn's digits."""
    spec = TensorSpec(name="input", dtype="float32", shape=("batch", 1, 8, 8))
    task = ImageClassification((spec,), preprocess=ImagePreprocess(channels=1))
    found = load_digits()
    images = (found.images / 16).astype(np.float32)[:, None]
    parts = split(make_dataset(list(images), task, labels=found.target.tolist()), {"learn": 1 - HELD, "held": HELD})

    def start(seed: int) -> Checkpoint:
        torch.manual_seed(seed)
        return Checkpoint.of(network(), task, outputs=(), source={"kind": "benchmark"}, size=0)

    return Study("digits, 32 wide", start, parts["learn"], parts["held"], training(150, 32, 2e-3))


def language(folder: Path) -> Study:
    """A GPT-2 of two layers learns docstrings."""
    given, _ = texts(folder, 1500)
    lines = [str(json.loads(line)["text"]) for line in given.read_text(encoding="utf-8").splitlines()]
    task = make_task(lines, LENGTH)
    parts = split(make_dataset(lines, task), {"learn": 1 - HELD, "held": HELD})

    def start(seed: int) -> Checkpoint:
        torch.manual_seed(seed)
        return Checkpoint.of(eager(make_gpt2(2, LENGTH)), task, outputs=(), source={"kind": "benchmark"}, size=0)

    return Study("causal LM", start, parts["learn"], parts["held"], training(150, 16, 3e-3))
