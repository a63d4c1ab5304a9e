"""Texts share rows and do not see one another: the same losses, fewer rows."""

import copy
import pickle

import models
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laconic.errors import RecipeError
from laconic.models.source_loading import load_source
from laconic.tasks.token_positions import IGNORED
from train.memory.sequence_packing import PackedLayout, SequencePacking, pack_first_fit
from train.objectives.cross_entropy import CrossEntropy
from train.objectives.next_token import NextToken, whole_logits
from train.planner.simulate import fakify, simulate
from train.step.objective import TARGETS
from train.step.step_parts import StepParts
from train.step.train_step import train_step

TEXTS = ["hello world", "the model answers every question about its weights and memory", "a", "b a", "it waits", ""]
SAVED = {"gpt2": models.save_gpt2, "llama": models.save_llama}


@pytest.fixture(scope="module", params=SAVED)
def checkpoint(request, tmp_path_factory):
    return load_source(SAVED[request.param](tmp_path_factory.mktemp(request.param) / "source"))


def make_parts(module, objective, *, lr=0.1):
    return StepParts(
        module,
        objective,
        lambda groups: torch.optim.SGD(groups, lr=lr),
        lambda module: [{"params": list(module.parameters())}],
    )


def each_loss(module, batch):
    """The loss of each target, by the tokens that lead to it."""
    hidden = module.hidden(**{name: batch[name] for name in batch if name not in (TARGETS, "filled")})
    logits = torch.nn.functional.linear(hidden, module.head.weight)
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch[TARGETS], reduction="none")
    return sorted(losses[batch[TARGETS] != IGNORED].tolist())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("length", [None, 5, 30])
def test_packed_texts_have_the_losses_that_they_have_apart(checkpoint, length, attention):
    checkpoint.module.model.set_attn_implementation(attention)
    objective = NextToken(checkpoint.task)
    padded = objective.collate(TEXTS, None)
    SequencePacking(length=length).apply(make_parts(checkpoint.module, objective))
    packed = objective.collate(TEXTS, None)
    assert len(packed["input_ids"]) < len(padded["input_ids"])
    assert packed["input_ids"].shape[1] == max(padded["input_ids"].shape[1], length or 0)
    assert objective.count_terms(packed) == int((packed[TARGETS] != IGNORED).sum())
    with torch.no_grad():
        expected, found = each_loss(checkpoint.module, padded), each_loss(checkpoint.module, packed)
        assert found == pytest.approx(expected, abs=1e-5)
        total = objective.loss(checkpoint.module, packed) / objective.count_terms(packed)
    assert total.item() == pytest.approx(np.mean(expected), abs=1e-5)
    checkpoint.module.model.set_attn_implementation("sdpa")


def test_packing_is_taken_off_again_and_changes_no_training(checkpoint):
    start = {name: value.clone() for name, value in checkpoint.module.state_dict().items()}

    def learned(*techniques, rows=None):
        checkpoint.module.load_state_dict(start)
        objective = NextToken(checkpoint.task)
        parts = make_parts(checkpoint.module.requires_grad_(True), objective)
        if rows is not None:
            parts.accumulate_gradients(rows)
        for technique in techniques:
            technique.apply(parts)
        state = parts.assemble()
        losses = [train_step(state, state.objective.collate(TEXTS, None)).item() for _ in range(3)]
        state.finish()
        assert "position_ids" not in objective.collate(TEXTS, None)
        checkpoint.module.load_state_dict(start)
        return losses

    plain = learned()
    assert learned(SequencePacking()) == pytest.approx(plain, abs=1e-5)
    assert learned(SequencePacking(), rows=1) == pytest.approx(plain, abs=1e-5)


def test_rows_that_are_full_need_no_counting(checkpoint):
    objective = NextToken(checkpoint.task)
    objective.layout = PackedLayout()
    batch = objective.collate(["a b", "hello world"], None)
    assert batch.keys() == {"input_ids", TARGETS, "position_ids"}
    assert objective.count_terms(batch) == 6


def test_a_packed_step_is_simulated_and_sent_to_workers(checkpoint):
    objective = NextToken(checkpoint.task)
    objective.layout = PackedLayout()
    objective.cross_entropy = lambda *given: whole_logits(*given)

    module = copy.deepcopy(checkpoint.module).requires_grad_(True)

    def prepare():
        return make_parts(fakify(module), objective).assemble(), objective.make_example(2, 9)

    assert simulate(prepare).peak() > 0
    assert objective.count_terms(objective.collate(TEXTS, None)) > 1
    again = pickle.loads(pickle.dumps(objective.collate))
    assert torch.equal(again(TEXTS, None)["input_ids"], objective.collate(TEXTS, None)["input_ids"])


def test_what_cannot_be_packed_is_refused(checkpoint, tmp_path):
    bert = load_source(models.save_bert(tmp_path / "bert"))
    with pytest.raises(RecipeError, match="takes one text per row"):
        SequencePacking().apply(make_parts(bert.module, CrossEntropy(bert.task)))
    with pytest.raises(RecipeError, match="takes none"):
        SequencePacking().apply(
            make_parts(bert.module.requires_grad_(False).model.bert.pooler, NextToken(checkpoint.task))
        )


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40))
def test_every_text_is_in_one_row_and_no_row_is_too_long(sizes):
    rows = pack_first_fit(sizes, 20)
    assert sorted(index for row in rows for index in row) == list(range(len(sizes)))
    assert all(sum(sizes[index] for index in row) <= 20 for row in rows)
    assert len(rows) <= 11 / 9 * -(-sum(sizes) // 20) + sum(size > 10 for size in sizes) + 1
