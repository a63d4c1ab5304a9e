"""Batches without a single loss term: nothing is learned from them, they are counted, and the run goes on."""

import copy
import json
import logging
import math

import pytest
import torch
from test_loop import ROWS, X, checkpoint, dataset, samples, settings
from torch.nn.functional import cross_entropy
from trainable_models import build, gpt2

from laconic.cache import Cache
from laconic.commands.training import summarize_tuned
from laconic.data.reader import make_dataset
from laconic.errors import DataError, TrainingFailure
from laconic.models.language_model import LanguageModel
from laconic.models.processors import plain_task
from laconic.tasks.token_positions import IGNORED
from train.callbacks.callback import StepReport, step_figures
from train.callbacks.journal import read_lines
from train.callbacks.monitor import StepMeter
from train.data.batch_sampler import BatchSampler
from train.finetune.evaluate import run_dataset
from train.finetune.finetune import FinetuneResult
from train.objectives.array_targets import Targets
from train.objectives.ctc_loss import align
from train.objectives.next_token import LEARNED, NextToken
from train.observers import LOG, ObserverSettings
from train.parallel.ranks import Ranks
from train.settings import Training
from train.step.objective import TARGETS, to_tensors
from train.step.parallel_strategy import ParallelStrategy
from train.step.train_step import train_step
from train.step_assembly import make_step_parts
from train.trainer import TrainResult, train

CPU = torch.device("cpu")
TECHNIQUES = {
    "plain": [],
    "micro-batches": [{"gradient-accumulation": {"rows": 1}}],
    "layerwise": [{"layerwise": {"rows": 1}}],
    "chunked loss": [{"chunked-cross-entropy": {"chunk": 4}}],
    "deferred loss": [{"chunked-cross-entropy": {"chunk": 4, "defer": True}}],
    "FP16": ["fp16"],
    "optimizer in backward": ["optimizer-in-backward"],
}


def texts(*learned):
    """Texts of six tokens, of which each has so many to learn, the last ones."""
    ids = torch.randint(1, 61, (len(learned), 6), generator=torch.Generator().manual_seed(0))
    masked = torch.arange(6)[None, :] < 6 - torch.tensor(learned)[:, None]
    return {"input_ids": ids, TARGETS: ids.masked_fill(masked, IGNORED), LEARNED: torch.tensor(learned)}


def make_state(techniques=(), clip=None):
    training = Training(techniques=techniques, optimizer={"adamw": {"lr": 1e-2}}, max_grad_norm=clip)
    parts = make_step_parts(LanguageModel(build(gpt2)), NextToken(None), training.components(), CPU)
    return parts.assemble()


def freeze(state):
    return copy.deepcopy((state.weights(), state.optimizer.state_dict(), state.scaler.state_dict()))


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_batch_without_a_term_changes_nothing_with_any_technique(name):
    state = make_state(TECHNIQUES[name])
    train_step(state, texts(3, 2))
    weights, optimizer, scaler = freeze(state)
    assert train_step(state, texts(0, 0)) is None
    after = freeze(state)
    assert all(torch.equal(value, after[0][key]) for key, value in weights.items())
    assert str(after[1:]) == str((optimizer, scaler))
    assert train_step(state, texts(3, 2)) is not None


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_micro_batch_without_a_term_leaves_the_mean_of_the_others(name):
    plain, state = make_state(), make_state(TECHNIQUES[name])
    for _ in range(2):
        expected, loss = (float(train_step(each, texts(0, 4, 0, 2))) for each in (plain, state))
        assert loss == pytest.approx(expected, abs=1e-4 if name != "FP16" else 2e-2)
        assert math.isfinite(loss)


class Ignoring(Targets):
    """Classes, of which those below 0 are ignored."""

    def collate(self, samples, labels):
        return to_tensors(self.task.encode(samples)) | {TARGETS: torch.tensor(labels)}

    def count_terms(self, batch):
        return int((batch[TARGETS] >= 0).sum())

    def loss(self, module, batch):
        return cross_entropy(module(batch["x"]), batch[TARGETS], ignore_index=-1, reduction="sum")


def unlabelled(*batches):
    """The rows of these batches of the first epoch lack their labels."""
    values, labels = samples()
    order = BatchSampler(ROWS, 8, seed=0)
    for number in batches:
        labels[order.batch(number)] = -1
    return make_dataset(list(values), plain_task("tensors", (X,), None), labels=labels.tolist(), name="rows")


def learn(folder, data, **changes):
    given = {"evaluate": changes.pop("evaluate")} if "evaluate" in changes else {}
    objective = Ignoring(plain_task("tensors", (X,), None))
    return train(
        checkpoint(), data, settings(**changes), folder, ranks=Ranks(), objective=objective, cache=Cache(folder / "c"),
        observers=ObserverSettings(quiet=True, tensorboard=True), **given,
    )  # fmt: skip


def test_a_run_counts_the_batches_that_it_skips(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "laconic.train"):
        result = learn(tmp_path, unlabelled(1, 2), steps=4)
    assert [math.isnan(loss) for loss in result.losses] == [False, True, True, False]
    assert (result.skipped, result.last_loss) == (2, result.losses[3])
    assert "2 of 4 batches had no loss term" in caplog.text
    lines = read_lines(tmp_path / LOG)
    assert [line["is_skipped"] for line in lines] == [False, True, True, False]
    assert [line["loss"] is None for line in lines] == [False, True, True, False]
    assert [line["speed"] == 0 for line in lines] == [False, True, True, False]


def test_a_run_that_skips_nothing_says_nothing(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "laconic.train"):
        assert learn(tmp_path, dataset(), steps=4).skipped == 0
    assert caplog.text == ""


@pytest.mark.parametrize("ignored", [(0,), (0, 1), (1,), (3,)])
def test_a_run_that_is_resumed_after_skipped_batches_goes_on_as_if_it_had_not_stopped(tmp_path, ignored):
    whole = learn(tmp_path / "whole", unlabelled(*ignored), steps=6, snapshot_every=2)

    def fail(state, steps):
        if steps == 4:
            raise RuntimeError("the machine went away")

    with pytest.raises(RuntimeError, match="went away"):
        learn(tmp_path / "part", unlabelled(*ignored), steps=6, snapshot_every=2, evaluate=fail)
    part = learn(tmp_path / "part", unlabelled(*ignored), steps=6, snapshot_every=2)
    assert str(part.losses) == str(whole.losses)
    assert part.skipped >= len(ignored)
    for name, value in whole.module.state_dict().items():
        assert torch.equal(value, part.module.state_dict()[name])


def test_a_run_or_an_evaluation_without_any_term_fails_and_says_where_to_look(tmp_path):
    with pytest.raises(TrainingFailure, match=r"none of 5 batches had a loss term.*Look at the labels"):
        learn(tmp_path, unlabelled(0, 1, 2, 3), steps=5)
    data, objective = unlabelled(0, 1, 2, 3), Ignoring(plain_task("tensors", (X,), None))
    with pytest.raises(DataError, match="no row of rows has a label that counts"):
        run_dataset(checkpoint().module, objective, data, CPU, 8, torch.no_grad, ParallelStrategy().compute)


def test_skipped_batches_have_no_loss_in_logs_and_are_counted_in_the_result(tmp_path):
    report = StepReport(step=1, loss=math.nan, lr=0.1, tokens=9, rows=2, seconds=0.5, waited=0.0, is_skipped=True)
    assert step_figures(report) == {"train/lr": 0.1, "train/tokens_per_second": 0}
    assert StepMeter(CPU).read(report).speed == 0
    tuned, training = checkpoint(), TrainResult(torch.nn.Identity(), [1.0, math.nan], "", "")
    result = FinetuneResult(tuned, tmp_path, {"loss": 1.0}, {"loss": 1.0}, training, "")
    found = json.loads(json.dumps(summarize_tuned(result), allow_nan=False))
    assert (found["losses"], found["skipped"]) == ([1.0, None], 1)


def test_empty_transcripts_among_others_have_finite_losses_and_gradients():
    scores = torch.randn(7, 3, 5).log_softmax(dim=-1).requires_grad_()
    frames, lengths = torch.tensor([7, 6, 7]), torch.tensor([0, 2, 0])
    losses = align(scores, torch.tensor([[0, 0], [1, 2], [0, 0]]), frames, lengths, 4)[0]
    losses.sum().backward()
    assert losses.isfinite().all()
    assert scores.grad.isfinite().all()
    none = align(scores.detach(), torch.zeros(3, 0, dtype=torch.int64), frames, torch.zeros(3, dtype=torch.int64), 4)[0]
    assert none.isfinite().all()
