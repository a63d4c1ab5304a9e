"""Batches whose products are computed in BF16 have few lengths, and the same losses."""

import models
import numpy as np
import pytest
import torch

from laconic import registry
from laconic.data.dataset import Dataset
from laconic.data.reader import read
from laconic.models.source_loading import load_source
from train.finetune.evaluate import evaluate
from train.memory.sequence_packing import PackedLayout
from train.settings import BF16_PADDING, Training

TEXTS = ["the", "hello world the model", "a model answers every question", "every question the model answers hello"]


def read_texts(folder, task, labels=()) -> Dataset:
    rows = [f'{{"text": "{text}"' + (f', "label": "{label}"' if labels else "") + "}" for text, label in zip(
        TEXTS, labels or TEXTS, strict=True)]  # fmt: skip
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return read(folder / "rows.jsonl", task)


def test_products_in_bf16_have_texts_padded_to_a_multiple_but_not_beyond_what_the_model_takes(tmp_path):
    def multiple(*techniques):
        return Training.model_validate({"techniques": list(techniques)}).components().padding_multiple

    assert multiple() == multiple("gradient-checkpointing") == 1
    assert multiple("bf16") == BF16_PADDING
    task = load_source(models.save_bert(tmp_path)).task
    lengths = [task.encode([text])["input_ids"].shape[1] for text in TEXTS]
    assert len({length % 4 for length in lengths}) > 1
    with task.padded(4):
        widths = [task.encode([text])["input_ids"].shape[1] for text in TEXTS]
        assert task.encode(["hello " * 500])["input_ids"].shape[1] == task.max_tokens
    assert widths == [-(-length // 4) * 4 for length in lengths]
    with task.padded(1000):
        assert task.encode(TEXTS)["input_ids"].shape == (4, task.max_tokens)
    assert task.encode(TEXTS)["input_ids"].shape == (4, max(lengths))


def test_a_classifier_has_the_same_loss(tmp_path):
    checkpoint = load_source(models.save_bert(tmp_path / "model"))
    dataset = read_texts(tmp_path, checkpoint.task, (checkpoint.task.labels * 4)[:4])
    objective = registry.resolve("objective", checkpoint.task.objective).of(checkpoint.task, dataset)

    def judge():
        return evaluate(checkpoint.module, objective, dataset, torch.device("cpu"), rows=4)

    expected = judge()
    with checkpoint.task.padded(8):
        assert judge() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("layout", [None, PackedLayout()])
def test_a_language_model_has_the_same_loss_and_tokens(tmp_path, layout):
    checkpoint = load_source(models.save_gpt2(tmp_path / "model"))
    task = checkpoint.task
    objective = registry.resolve("objective", task.objective).of(task)
    objective.layout = layout or objective.layout
    rows = objective.prepare_rows(read_texts(tmp_path, task)).samples

    def judge(samples):
        batch = objective.collate(samples, None)
        loss = objective.loss(checkpoint.module, batch)
        return batch["input_ids"].shape[1], float(loss), objective.count_terms(batch), objective.count_tokens(batch)

    for samples in (list(rows), [rows[-1]] * 2):  # texts of several lengths, and of one
        width, *expected = judge(samples)
        with task.padded(8):
            padded, *found = judge(samples)
        assert width % 8
        assert padded == -(-width // 8) * 8
        assert found == pytest.approx(expected, rel=1e-5)
        assert np.isfinite(found[0])
