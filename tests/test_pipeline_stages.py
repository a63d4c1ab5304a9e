"""Where a model is cut into the stages of a pipeline, how long these wait for each other, and what is refused."""

import contextlib
import json

import models
import pytest
import torch
import transformers
from rank_processes import by_two_ranks
from test_tensor_parallel import CPU, bert, gpt2, llama, make_rows
from torch import nn

from laconic.cache import Cache
from laconic.errors import RecipeError
from laconic.progress import Steps
from train.finetune.finetune import finetune
from train.objectives.cross_entropy import TokenCrossEntropy
from train.objectives.next_token import NextToken
from train.parallel.mesh import Mesh
from train.parallel.pipeline_schedules import (
    SCHEDULES,
    check_rows,
    check_tied,
    choose_rows,
    explain_recomputation,
    list_actions,
    measure_bubble,
)
from train.parallel.ranks import Ranks
from train.parallel.stage_plan import cut_evenly, plan_stages
from train.parallel.stage_weights import copy_skeleton
from train.settings import Training, TrainingRecipe
from train.step_assembly import distribute_step, make_step_parts

SMALL = {"vocab_size": 31, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 8, "pad_token_id": 0}


def test_a_large_head_is_worth_some_layers():
    model = llama(num_hidden_layers=6, vocab_size=2000)
    plan = plan_stages(model, NextToken(None), make_rows(0), 2)
    assert plan.layers == (range(5), range(5, 6))
    assert plan.before == {"model.model.embed_tokens.weight"}
    assert plan.after == {"model.model.norm.weight", "model.lm_head.weight"}


def test_tied_weights_are_in_both_ends_and_unused_ones_in_the_last():
    plan = plan_stages(gpt2(), NextToken(None), make_rows(0), 2)
    assert plan.find_stages("model.transformer.wte.weight") == plan.find_stages("model.lm_head.weight") == (0, 1)
    assert plan.find_stages("model.transformer.wpe.weight") == (0,)
    assert plan.find_stages("model.lm_head.lora_A.default.weight") == (0, 1)
    assert plan.find_stages("model.pooler.weight") == (1,)


@pytest.mark.parametrize(
    ("costs", "parts", "expected"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([1, 1, 1, 1, 4], 2, [4, 1]),
        ([4, 1, 1, 1, 1], 3, [1, 2, 2]),
        ([1, 2, 3], 3, [1, 1, 1]),
    ],
)
def test_the_most_expensive_stage_is_as_cheap_as_possible(costs, parts, expected):
    assert [len(part) for part in cut_evenly(tuple(costs), parts)] == expected


@pytest.mark.parametrize(
    ("kind", "ranks", "number"), [("gpipe", 2, 4), ("1f1b", 2, 4), ("1f1b", 4, 8), ("gpipe", 4, 16)]
)
def test_the_bubble_of_equal_stages_is_that_of_the_papers(kind, ranks, number):
    schedule = object.__new__(SCHEDULES[kind].make)
    share = measure_bubble(list_actions(schedule, ranks, number), [1.0] * ranks)
    assert share == pytest.approx((ranks - 1) / (number + ranks - 1))


def test_a_skeleton_has_the_shapes_of_a_model_and_none_of_its_weights():
    skeleton = copy_skeleton(bert(), CPU)
    assert sum(parameter.untyped_storage().nbytes() for parameter in skeleton.parameters()) < 1000
    ids = torch.ones((2, 5), dtype=torch.int64)
    assert skeleton(ids).logits.shape == (2, 5, 31)


class TwiceCalled(nn.Module):
    """Its layers run twice."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 4), nn.Linear(4, 31)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in "ab")

    def forward(self, input_ids, attention_mask):
        hidden = self.embedding(input_ids)
        for layer in (*self.layers, *self.layers):
            hidden = layer(hidden)
        return self.head(hidden)


class Skipping(TwiceCalled):
    """What comes before the layers is added behind them."""

    def forward(self, input_ids, attention_mask):
        hidden = first = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden + first)


class Adding(TwiceCalled):
    """Between two layers something is added."""

    def forward(self, input_ids, attention_mask):
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden) + 1
        return self.head(hidden)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bert(num_hidden_layers=3), r"BertForMaskedLM has 3 layers, which are too few for 4 stages"),
        (lambda: nn.Linear(2, 2), "Linear has no lists of repeated layers"),
        (lambda: transformers.MPNetForMaskedLM(transformers.MPNetConfig(**SMALL, num_hidden_layers=4)), "from outside"),
        (TwiceCalled, "has 2 layers"),
    ],
)
def test_models_that_have_no_such_stages_are_refused(make, message):
    with pytest.raises(RecipeError, match=message):
        plan_stages(make(), TokenCrossEntropy(None), make_rows(0), 4)


@pytest.mark.parametrize(
    ("kind", "message"),
    [(TwiceCalled, "call each of its layers once"), (Skipping, "more than the hidden states"), (Adding, "between two")],
)
def test_models_whose_stages_would_need_more_than_hidden_states_are_refused(kind, message):
    with pytest.raises(RecipeError, match=f"{kind.__name__} cannot be cut into stages: .*{message}"):
        plan_stages(kind(), TokenCrossEntropy(None), make_rows(0), 2)


def test_rows_that_make_no_micro_batches_are_refused():
    assert choose_rows(16, 2, "1f1b") == 2
    assert choose_rows(22, 4, "interleaved") == 3
    with pytest.raises(RecipeError, match="3 rows cannot be split into as many micro-batches as the 4 ranks"):
        choose_rows(3, 4, "1f1b")
    with pytest.raises(RecipeError, match=r"makes 2 micro-batches of 6 rows.* needs at least 4"):
        check_rows(6, 3, 4, "1f1b")
    with pytest.raises(RecipeError, match=r"makes 11 micro-batches of 11 rows.* needs a multiple of 2"):
        check_rows(11, 1, 4, "interleaved")


def test_tied_weights_in_shards_cannot_be_on_both_ends_of_a_folded_pipeline():
    check_tied({"lm_head.weight"}, "interleaved")
    check_tied((), "zbv")
    with pytest.raises(RecipeError, match=r"zbv has the first and the last stage on one rank.* share lm_head.weight"):
        check_tied({"lm_head.weight"}, "zbv")


def finetune_in_stages(rank, folder):
    """Fine-tune with checkpoints in a pipeline whose backward passes are in two parts; keeps what is printed."""
    recipe = TrainingRecipe.load(folder / "recipe.yaml")
    with (folder / f"{rank}.txt").open("w") as file, contextlib.redirect_stderr(file):
        finetune(recipe, folder / "tuned", device=CPU, steps=Steps(), cache=Cache(folder / "cache"))


def test_finetune_says_what_checkpoints_cost_in_two_parts(tmp_path, monkeypatch):
    models.save_gpt2(tmp_path / "gpt2", layers=4)
    (tmp_path / "data.txt").write_text("\n".join(["hello world a b"] * 30 + ["b a world hello"] * 30))
    content = {"source": str(tmp_path / "gpt2"), "task": "text-generation", "data": str(tmp_path / "data.txt")}
    content |= {"mesh": {"pipeline": 2, "schedule": "zbv"}, "techniques": ["gradient-checkpointing"], "steps": 2}
    (tmp_path / "recipe.yaml").write_text(json.dumps(content | {"precision": "fp32", "loader": {"workers": 0}}))
    assert by_two_ranks(finetune_in_stages, tmp_path, monkeypatch) == [0, 0]
    sentence = "by the stages' FLOPs; zbv computes checkpoints again for each group of weights: `laconic plan --link`"
    assert sentence in " ".join((tmp_path / "0.txt").read_text().split())
    assert not explain_recomputation(Mesh(pipeline=2, schedule="zbv"), ["lora"])
    assert not explain_recomputation(Mesh(pipeline=2), ["gradient-checkpointing"])


def test_a_technique_that_needs_the_whole_model_is_refused():
    training = Training(mesh={"pipeline": 2}, techniques=("chunked-cross-entropy",))
    parts = make_step_parts(llama(), NextToken(None), training.components(), CPU)
    with pytest.raises(RecipeError, match=r"chunked-cross-entropy and mesh \(pipeline\) cannot be combined"):
        distribute_step(parts, training, Ranks(0, 2))


def test_a_mesh_of_another_size_than_the_world_is_refused():
    with pytest.raises(RecipeError, match=r"4 ranks .pipeline 4. were expected, and 2 were started"):
        Mesh(pipeline=4).resolve(2)
