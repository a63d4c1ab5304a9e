"""DeepSpeed shards a model in the place of FSDP: the same losses, and snapshots that go on on either."""

import importlib.util
import json

import pytest
import torch
from test_parallel import (
    BATCH,
    COUNT,
    CPU,
    KEPT,
    PARTS,
    STEPS,
    Classifier,
    answers,
    assembled,
    by_two_ranks,
    rows_of,
    settings,
)
from torch import nn

from laconic.errors import MissingPackage, RecipeError, UsageError
from train.data.batch_sampler import BatchSampler
from train.objectives.array_targets import Targets
from train.parallel.deepspeed_zero import shard_by_deepspeed
from train.parallel.mesh import Mesh
from train.parallel.ranks import Ranks, open_ranks
from train.planner.plan_source import load_training
from train.run_snapshot import resume, save_snapshot
from train.snapshots.snapshot import Snapshots
from train.snapshots.tensor_shards import FlatFragment, split_state
from train.step.train_step import train_step
from train.step_assembly import make_step_parts

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install 'laconic[deepspeed]'"
)
STAGES = (1, 2, 3)
UNUSED = {"freeze": ["spare"]}
"""DeepSpeed keeps state for a parameter without a gradient, too."""
RUNS = {
    "one pass": ((1, 2, 3), (), UNUSED),
    "parts": ((2, 3), (PARTS, "gradient-checkpointing"), {"freeze": ["spare", "embedding"], "layer_decay": 0.5}),
    "not clipped": ((1,), ("lora",), {"optimizer": {"sgd": {"lr": 1e-2, "momentum": 0.9}}, "max_grad_norm": None}),
}
MOVES = ((None, 1), (1, 2), (2, 3), (3, None))
"""Stages that snapshots are of, and that go on from them; None for FSDP."""


def with_zero(stage, *run):
    return settings({"shard": None, "zero": stage}, *run)


def train_on(state, training, ranks, start, stop):
    """The losses, and the norms of the gradients."""
    order = BatchSampler(COUNT, BATCH, seed=0, rank=ranks.rank, world=ranks.world)
    figures = []
    for number in range(start, stop):
        loss = train_step(state, rows_of(order.batch(number)), max_grad_norm=training.max_grad_norm)
        figures.append((float(loss), float(state.gradient_norm or 0)))
    return figures


def begin(training, ranks):
    state = assembled(training, ranks)
    state.scheduler = training.components().schedule.build(state.optimizer, STEPS)
    return state


def shard_by_each(rank, folder):
    """Every run by FSDP and by its stages, some of which go on from the snapshots of others."""
    figures = {}
    with open_ranks(CPU, Mesh(shard=None)) as ranks:
        for name, (stages, *run) in RUNS.items():
            for stage in (None, *stages):
                training = with_zero(stage, *run)
                state = begin(training, ranks)
                steps = train_on(state, training, ranks, 0, KEPT)
                with Snapshots(folder / f"{name} {stage}") as snapshots:
                    save_snapshot(snapshots, state, [0.0] * KEPT, wait=True)
                steps += train_on(state, training, ranks, KEPT, STEPS)
                with state.strategy.gather_weights():
                    during = answers(state.module)
                module = state.finish()
                assert torch.allclose(answers(module), during, atol=1e-6)
                figures[f"{name} {stage}"] = {"steps": steps, "answers": answers(module).tolist()}
        for saved, loaded in MOVES:
            training = with_zero(loaded, *RUNS["one pass"][1:])
            state = begin(training, ranks)
            with Snapshots(folder / f"one pass {saved}") as snapshots:
                assert len(resume(state, snapshots, rows_of([rank]))) == KEPT
            figures[f"{saved} to {loaded}"] = train_on(state, training, ranks, KEPT, STEPS)
            module = state.finish()
            if loaded:
                check_restored(module)
    (folder / f"{rank}.json").write_text(json.dumps(figures))


def check_restored(module):
    """The module is as it was, but for its values."""
    for part, like in zip(module.modules(), Classifier().modules(), strict=True):
        assert (type(part), list(vars(part)), type(part._parameters)) == (type(like), list(vars(like)), dict)
        assert not any(vars(part)[name] for name in vars(like) if name.endswith("hooks"))
    assert [vars(parameter) for parameter in module.parameters() if vars(parameter)] == []
    assert nn.functional.linear is torch._C._nn.linear
    module(rows_of([0])["ids"]).sum().backward()
    module.load_state_dict(Classifier().state_dict())


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed")
    with pytest.MonkeyPatch.context() as patch:
        assert by_two_ranks(shard_by_each, folder, patch) == [0, 0]
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    return first


@needs_deepspeed
@pytest.mark.parametrize(("name", "stage"), [(name, stage) for name, run in RUNS.items() for stage in run[0]])
def test_a_stage_has_the_losses_and_norms_of_fsdp(name, stage, figures):
    expected, run = figures[f"{name} None"], figures[f"{name} {stage}"]
    assert torch.tensor(run["steps"]).allclose(torch.tensor(expected["steps"]), rtol=0, atol=1e-5)
    assert torch.tensor(run["answers"]).allclose(torch.tensor(expected["answers"]), atol=1e-4)


@needs_deepspeed
@pytest.mark.parametrize("move", MOVES)
def test_a_snapshot_goes_on_on_another_stage_and_by_fsdp(move, figures):
    expected = torch.tensor(figures["one pass None"]["steps"][KEPT:])
    steps = torch.tensor(figures["{} to {}".format(*move)])
    assert steps.allclose(expected, rtol=0, atol=1e-5)


def test_fragments_of_a_tensor_are_kept_as_boxes_that_make_it_whole():
    values = torch.arange(24.0)
    whole = torch.full((2, 3, 4), -1.0)
    for start, end, boxes in ((0, 5, 2), (5, 23, 4), (23, 24, 1), (24, 24, 0)):
        state = {"weight": FlatFragment(whole.shape, start, values[start:end])}
        shards, plain = split_state(state)
        assert (len(shards), plain) == (boxes, {})
        for shard in shards.values():
            place = tuple(slice(at, at + size) for at, size in zip(shard.offset, shard.tensor.shape, strict=True))
            assert torch.all(whole[place] == -1)
            whole[place] = shard.tensor
    assert torch.equal(whole.flatten(), values)
    (scale,) = split_state({"scale": FlatFragment(torch.Size(()), 0, values[:1])})[0].values()
    assert (scale.shape, scale.tensor) == ((), 0)


# What cannot be


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"zero": 2}, "zero shards over all ranks. Set shard: null beside it"),
        ({"zero": 2, "shard": 2}, "Set shard: null"),
        ({"zero": 4, "shard": None}, "Input should be 1, 2 or 3"),
        ({"zero": 1, "shard": None, "replicate": 2}, "replicate is for other meshes"),
        ({"zero": 1, "shard": None, "tensor": 2}, "tensor is for other meshes"),
        ({"zero": 1, "shard": None, "pipeline": 2}, "pipeline is for other meshes"),
        ({"zero": 3, "shard": None, "offload": True}, "offload is for other meshes"),
        ({"zero": 3, "shard": None, "precision": "bf16"}, "precision is for other meshes"),
        ({"zero": 3, "auto": True}, "auto is for other meshes"),
    ],
)
def test_meshes_that_deepspeed_does_not_make_are_refused(mesh, message):
    with pytest.raises(ValueError, match=message):
        Mesh(**mesh)


@pytest.mark.parametrize(
    ("changes", "techniques", "message"),
    [
        ({"ema": 0.9}, (), r"ema and mesh \(zero\) cannot be combined"),
        ({"optimizer": "lamb"}, (), "Lamb needs whole weights"),
        ({"optimizer": "lion"}, (), r"Lion .*flat parts of many. Choose adamw or sgd"),
        ({"optimizer": {"adamw": {"stochastic_rounding": True}}}, (), "without stochastic_rounding"),
        ({}, ("compile",), r"compile and mesh \(zero\) cannot be combined"),
        ({}, ("host-weights",), r"host-weights and mesh \(zero\)"),
        ({}, ("fp16",), r"fp16 and mesh \(shard\)"),
        ({}, ("layerwise",), r"layerwise and mesh \(shard\)"),
    ],
)
def test_settings_that_deepspeed_does_not_take_are_refused_before_anything_runs(changes, techniques, message):
    with pytest.raises(RecipeError, match=message):
        with_zero(2, techniques, changes)


def test_weights_of_another_precision_are_refused():
    training = with_zero(1)
    parts = make_step_parts(Classifier(), Targets(None), training.components(), CPU)
    parts.module.head.bfloat16()
    with pytest.raises(RecipeError, match=r"head.weight is bfloat16, and DeepSpeed takes float32 weights"):
        shard_by_deepspeed(parts, Ranks(), 1, 1, None)


def test_deepspeed_is_asked_for_before_the_ranks_open(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"pip install 'laconic\[deepspeed\]'"), open_ranks(CPU, with_zero(1).mesh):
        pass


def test_a_plan_predicts_stage_3_as_shards_and_no_other(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("mesh: {shard: null, zero: 3}")
    assert load_training(tmp_path, recipe, {}, 2, trust=False).mesh == Mesh(shard=None)
    recipe.write_text("mesh: {shard: null, zero: 2}")
    with pytest.raises(UsageError, match="zero: 2 is not predicted"):
        load_training(tmp_path, recipe, {}, 2, trust=False)
