"""Meshes are planned without the devices: against ranks that are there, and for a thousand that are not."""

import json
import math
import os
from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers
import yaml
from pydantic import ValidationError
from rank_processes import by_two_ranks
from test_fleet import RATES, let_go
from test_tensor_parallel import KEPT, begin, learn, make_rows
from torch.utils._python_dispatch import TorchDispatchMode

from laconic.commands.mesh_table import print_meshes
from laconic.errors import RecipeError
from laconic.files import read_json
from laconic.models import huggingface, wrappers
from laconic.progress import Steps
from train.finetune.mesh_choice import settle_mesh
from train.parallel.collective_traffic import TrafficCounter, name_groups
from train.parallel.mesh import Mesh
from train.parallel.pipeline import make_pipeline
from train.parallel.pipeline_schedules import SCHEDULES, measure_bubble
from train.parallel.ranks import Ranks, open_ranks
from train.planner import mesh_plan
from train.planner.memory_prediction import sum_categories
from train.planner.mesh_cases import EXACT_LAYERS, EXACT_ROWS, spread
from train.planner.mesh_plan import CaseSimulator, choose_mesh, describe_mesh, list_meshes, parse_link, plan_mesh
from train.planner.mesh_plots import plot_meshes
from train.planner.mesh_prediction import list_cases, predict_mesh
from train.planner.mesh_summary import summarize_meshes
from train.planner.meta_model import open_meta_model
from train.planner.prediction import predict_rank
from train.planner.simulate import trace_memory
from train.planner.stage_footprint import StageCase, combine_footprints
from train.planner.stage_simulation import make_job
from train.planner.stage_walk import compute_bubble, order_actions
from train.planner.step_cost import count_flops, has_flops
from train.run_snapshot import resume, save_snapshot
from train.settings import Training, TrainingRecipe
from train.snapshots.snapshot import Snapshots
from train.step.train_step import train_step
from train.step_assembly import distribute_step, make_step_parts

CPU = torch.device("cpu")
LENGTH, ROWS = 24, 8
MESHES = {
    2: {
        "tensor": {"tensor": 2},
        "context": {"context": 2},
        "pipeline": {"pipeline": 2},
        "zbv": {"pipeline": 2, "schedule": "zbv"},
        "zbv with checkpoints": {"pipeline": 2, "schedule": "zbv"},
        "replicate": {"replicate": 2},
        "replicate, sent in FP16": {"replicate": 2, "compress": "fp16"},
        "replicate, pure BF16 sent in FP16": {"replicate": 2, "compress": "fp16"},
    },
    4: {
        "pipeline of four": {"pipeline": 4},
        "shard x tensor": {"shard": 2, "tensor": 2},
        "tensor x pipeline": {"pipeline": 2, "tensor": 2},
        "shard x pipeline": {"pipeline": 2, "shard": 2},
        "shard x interleaved": {"pipeline": 2, "shard": 2, "schedule": "interleaved"},
        "shard x zbv": {"pipeline": 2, "shard": 2, "schedule": "zbv"},
        "replicate x shard": {"replicate": 2, "shard": 2},
        "replicate x context": {"replicate": 2, "context": 2},
        "shard x context": {"shard": 2, "context": 2},
    },
}
"""By the number of ranks."""
CHANGES = {
    "zbv with checkpoints": {"techniques": ["gradient-checkpointing"]},
    "replicate, pure BF16 sent in FP16": {
        "techniques": ["pure-bf16"],
        "optimizer": {"adamw": {"stochastic_rounding": True}},
    },
}
"""Other settings of some of the meshes."""
SEQUENCE = {"tensor": 2, "sequence": True}
WORLDS = [(2, "llama"), (4, "llama"), (2, "gpt2")]
"""Numbers of ranks with the model that they train. GPT-2, with other weights to divide, is swept."""


def save_config(folder, kind, layers=4):
    if kind == "gpt2":
        sizes = {"n_embd": 64, "n_layer": layers, "n_head": 4, "n_positions": LENGTH}
        config = transformers.GPT2Config(vocab_size=300, bos_token_id=0, eos_token_id=0, **sizes)
        config.architectures = ["GPT2LMHeadModel"]
    else:
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 100, "num_hidden_layers": layers}
        config = transformers.LlamaConfig(vocab_size=300, max_position_embeddings=LENGTH, pad_token_id=0, **sizes)
        config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder / kind)
    return folder / kind


def settings(mesh, rows=ROWS, **changes):
    return Training(batch_size=rows, mesh=mesh, **changes)


class FlopCounter(TorchDispatchMode):
    """Counts the floating-point operations of the body."""

    flops = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.flops += count_flops(func, args, kwargs or {}, out) if has_flops(func) else 0.0
        return out


def measure(folder, training, ranks, groups):
    """What a mesh takes on this rank, on real tensors, and what the rank sends and computes in a step.
    groups: sizes of all process
    groups so far, some of which DTensor uses again for an equal mesh."""
    prepared = []
    subject = open_meta_model(folder)
    source = huggingface.describe_source(folder, read_json(folder / "config.json"), subject.task.name)

    def prepare():
        module = wrappers.build(source)
        objective = subject.objective()
        batch = objective.make_example(math.ceil(training.batch_size / ranks.data_world), LENGTH)
        parts = make_step_parts(
            module,
            objective,
            training.components(),
            CPU,
            sharded=training.mesh.is_sharded,
            tensor=ranks.select_axes("tensor"),
            sequence=training.mesh.sequence,
            context=ranks.context,
            pipeline=make_pipeline(training.mesh, ranks, batch),
        )
        distribute_step(parts, training, ranks)
        prepared.extend((parts.assemble(), batch))
        return tuple(prepared)

    timeline = trace_memory(prepare, CPU, clip=training.max_grad_norm)
    groups |= name_groups(ranks)
    with TrafficCounter(groups, ranks.world) as traffic, FlopCounter() as counter:
        train_step(*prepared, max_grad_norm=training.max_grad_norm)
    return timeline.peak(), traffic.sent, counter.flops


def measure_each(rank, folder):
    world = int(os.environ["WORLD_SIZE"])
    figures, groups = {}, {}
    for name in ("all_gather_single", "reduce_scatter_single"):
        setattr(torch.distributed, name, let_go(getattr(torch.distributed, name)))  # in a process of the test's own
    with open_ranks(CPU, Mesh()):
        meshes = MESHES[world] | ({"sequence": SEQUENCE} if world == 2 else {})
        for name, mesh in meshes.items():
            training = settings(mesh, **CHANGES.get(name, {}))
            figures[name] = measure(folder, training, Ranks.of(rank, world, CPU, training.mesh), groups)
    (folder / f"{rank}.json").write_text(json.dumps(figures))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What ranks measure: the folder of the model, and the figures of each rank by mesh."""

    @cache
    def measure_ranks(world, kind):
        folder = save_config(tmp_path_factory.mktemp("meshes"), kind)
        with pytest.MonkeyPatch.context() as patch:
            assert by_two_ranks(measure_each, folder, patch, world) == [0] * world
        return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]

    return measure_ranks


def predict(subject, training, world, rates=RATES):
    job = make_job(subject, training, LENGTH, rates)
    sizes = training.mesh.resolve(world)
    simulated = {
        case: CaseSimulator(job).simulate(case) for case in set(list_cases(job, sizes, training.mesh.schedule))
    }
    return predict_mesh(job, sizes, training.mesh.schedule, simulated)


def sweep_gpt2(*values):
    return pytest.param(*values, marks=pytest.mark.sweep if "gpt2" in values else ())


@pytest.mark.parametrize(
    ("world", "kind", "name"), [sweep_gpt2(world, kind, name) for world, kind in WORLDS for name in MESHES[world]]
)
def test_the_prediction_is_what_each_rank_measures(world, kind, name, measured):
    folder, figures = measured(world, kind)
    training = settings(MESHES[world][name], **CHANGES.get(name, {}))
    prediction = predict(open_meta_model(folder), training, world)
    apart = world // len(prediction.ranks)
    for rank, figure in enumerate(figures):
        found = prediction.ranks[rank // apart]
        assert sum_categories(found) == pytest.approx(figure[name][0], rel=0.01)
    # The counts and the loss of a step, and the map of used parameters, are not planned.
    busiest = max(figure[name][1] for figure in figures)
    assert sum(prediction.traffic.values()) == pytest.approx(busiest, abs=512)
    assert prediction.cost.flops == pytest.approx(max(figure[name][2] for figure in figures), rel=1e-3)


@pytest.mark.parametrize("kind", ["llama", sweep_gpt2("gpt2")])
def test_the_prediction_for_parts_of_the_sequence_is_what_a_rank_measures(kind, measured):
    folder, figures = measured(2, kind)
    prediction = predict_rank(open_meta_model(folder), settings(SEQUENCE), LENGTH, RATES, 2, whole=True)
    assert prediction.peak == pytest.approx(figures[0]["sequence"][0], rel=1e-3)


def test_meshes_are_planned_with_the_context_of_the_recipe(tmp_path):
    job = make_job(open_meta_model(save_config(tmp_path, "llama")), settings({"context": 2}), LENGTH, RATES)
    names = [str(mesh.resolve(8)) for mesh in list_meshes(job, 8)]
    assert names == ["replicate 4 x context 2", "replicate 2 x shard 2 x context 2", "shard 4 x context 2"]
    assert not [*list_meshes(job, 3)]


def test_what_is_not_simulated_is_on_the_line_through_what_is(tmp_path):
    subject = open_meta_model(save_config(tmp_path, "llama", 8))
    layout = {"place": "middle", "layers": 3, "rows": 12, "tensor": 1}
    job = make_job(subject, settings({}), LENGTH, RATES)
    exact = CaseSimulator(job).simulate(StageCase(**layout))
    line = combine_footprints(
        (a * b, CaseSimulator(job).simulate(StageCase("middle", layers, rows, 1)))
        for a, layers in spread(3, EXACT_LAYERS)
        for b, rows in spread(12, EXACT_ROWS)
    )
    for name in ("held", "gradients", "saved", "forward", "backward", "optimizer"):
        assert getattr(line, name).sum() == pytest.approx(getattr(exact, name).sum(), rel=0.005), name
    assert line.hidden == exact.hidden
    for kind, cost in exact.passes.items():
        assert line.passes[kind].flops == pytest.approx(cost.flops, rel=0.001)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize(("ranks", "number"), [(2, 4), (4, 16)])
def test_the_bubble_is_that_of_torchs_order(schedule, ranks, number):
    stages = SCHEDULES[schedule].stages
    share = measure_bubble(order_actions(schedule, ranks, number), [1.0] * (stages * ranks))
    assert compute_bubble(schedule, ranks, number) == pytest.approx(share, rel=0.02)


def test_a_rank_of_a_pipeline_holds_what_is_in_flight(tmp_path):
    subject = open_meta_model(save_config(tmp_path, "llama"))
    gpipe, steady = (
        [rank["activations"] for rank in predict(subject, settings(mesh, 16), 4).ranks]
        for mesh in ({"pipeline": 4, "schedule": "gpipe"}, {"pipeline": 4})
    )
    assert steady == sorted(steady, reverse=True)
    assert all(all_of_them > few for all_of_them, few in zip(gpipe, steady, strict=True))


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A plan for four ranks of a small model."""
    model = open_meta_model(save_config(tmp_path_factory.mktemp("planned"), "llama", 2))
    link = parse_link("2GB/s")
    return plan_mesh(
        model, settings({}, 4), length=16, devices=4, memory=2**30, link=link, device=CPU, rates=RATES,
        steps=Steps(quiet=True),
    )  # fmt: skip


@pytest.mark.sweep
def test_each_mesh_that_divides_the_model_is_planned(planned, tmp_path):
    content = summarize_meshes(planned)
    rows = {row["name"]: row for row in content["rows"]}
    assert content["chosen"] in rows
    assert {"replicate 4", "shard 4", "shard 2 x tensor 2", "pipeline 2 x tensor 2, 1f1b"} <= set(rows)
    assert "pipeline 4, 1f1b" not in rows, "there are two layers"
    pipeline = rows["pipeline 2 x tensor 2, gpipe"]
    assert len(pipeline["ranks"]) == 2
    assert pipeline["bubble"] == pytest.approx(1 / (pipeline["micro_batches"] + 1))
    for row in rows.values():
        sent = sum(row["traffic"].values())
        assert row["seconds"] == pytest.approx(row["compute_seconds"] + sent / 2e9)


def test_what_ranks_send_is_what_collectives_of_rings_take(planned):
    rows = {describe_mesh(row): row.prediction.traffic for row in planned.rows}
    weights, hidden = 4 * planned.model.parameters, 4 * 16 * 64
    assert rows["replicate 4"] == {"replicate": pytest.approx(2 * 3 / 4 * weights)}
    assert rows["pipeline 2 x tensor 2, gpipe"]["pipeline"] == 4 * hidden  # of four rows, forward or backward
    # Weights of layers are gathered twice, the others once, and gradients are reduced.
    assert 2 * 3 / 4 * weights < rows["shard 4"]["shard"] < 3 * 3 / 4 * weights
    # A layer sums two outputs, and the gradients of what attention and FFN read; embedding and head sum once each.
    assert rows["shard 2 x tensor 2"]["tensor"] == pytest.approx((2 * 4 + 2) * 2 * hidden, rel=0.01)


def test_the_fastest_mesh_that_fits_is_proposed_and_drawn(planned, tmp_path, capsys):
    plot_meshes(planned, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    print_meshes(planned, everything=True)
    text = " ".join(capsys.readouterr().out.split())
    assert "The fastest that fits into 1.00 GiB" in text
    assert "In a recipe: mesh: {" in text
    least = min(row.need for row in planned.rows)
    assert choose_mesh(planned.rows, round(1.1 * least)).need < 1.1 * least
    print_meshes(replace(planned, memory=1024, chosen=choose_mesh(planned.rows, 1024)))
    assert "No mesh fits into 1 KiB: the least is" in " ".join(capsys.readouterr().out.split())


def test_the_price_of_checkpoints_in_two_parts_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(mesh_plan, "list_meshes", lambda *_: [Mesh(pipeline=2), Mesh(pipeline=2, schedule="zbv")])
    model = open_meta_model(save_config(tmp_path, "llama", 4))
    for techniques in ((), ("gradient-checkpointing",)):
        plan = plan_mesh(
            model, settings({}, 4, techniques=techniques), length=16, devices=2, memory=2**30, link=parse_link("2GB/s"),
            device=CPU, rates=RATES, steps=Steps(quiet=True),
        )  # fmt: skip
        print_meshes(plan)
        text = " ".join(capsys.readouterr().out.split())
        assert ("zbv computes checkpoints again for each group of weights: 2.5 times the FLOPs" in text) == bool(
            techniques
        )


def test_meshes_are_planned_from_the_command_line(laconic, tmp_path):
    folder = save_config(tmp_path, "llama", 2)
    code, out, _ = laconic("plan", folder, "--memory", "1GiB", "--devices", 2, "--link", "nvlink", "--seq", 8, "--json")
    content = json.loads(out)
    assert code == 0
    assert content["chosen"] in [row["name"] for row in content["rows"]]
    for arguments, message in (
        (["--devices", 2, "--link", "string"], "link 'string' is not known; expected nvlink, infiniband"),
        (["--devices", 2, "--link", "nvlink", "--timeline", tmp_path / "a.svg"], "no timeline is drawn"),
        (["--link", "nvlink"], "--link connects several devices"),
    ):
        code, _, err = laconic("plan", folder, "--memory", "1GiB", *arguments)
        assert code == 2
        assert message in err


def choose_each(rank, folder):
    """The mesh that is left to the planner, on this rank."""
    recipe = TrainingRecipe(source="none", data={"train": "none"}, batch_size=4, mesh="auto")
    subject = open_meta_model(folder / "llama")
    with open_ranks(CPU, recipe.mesh) as ranks:
        settled, ranks = settle_mesh(recipe, subject, 16, ranks, Steps(quiet=True), 2**30)
        figures = {"mesh": settled.mesh.model_dump(), "sizes": str(ranks.sizes), "first": ranks.is_first}
        state, losses = begin("llama", settled.mesh, (), ranks), []
        learn(state, ranks, losses, [], KEPT)
        with Snapshots(folder / "snapshots") as snapshots:
            save_snapshot(snapshots, state, losses, wait=True)
        tight = recipe.model_copy(update={"memory": 1024})
        try:
            settle_mesh(tight, subject, 16, ranks, Steps(quiet=True), 2**30)
        except RecipeError as error:
            figures["refused"] = str(error)
    (folder / f"auto-{rank}.json").write_text(json.dumps(figures))


def test_ranks_take_the_mesh_that_the_first_has_chosen_and_one_process_goes_on_without_one(tmp_path, monkeypatch):
    save_config(tmp_path, "llama", 2)
    assert by_two_ranks(choose_each, tmp_path, monkeypatch) == [0, 0]
    first, second = (json.loads((tmp_path / f"auto-{rank}.json").read_text()) for rank in range(2))
    assert first["mesh"] == second["mesh"]
    assert not first["mesh"]["auto"]
    assert first["sizes"] == second["sizes"] == str(Mesh(**first["mesh"]).resolve(2))
    assert first["refused"] == second["refused"]
    assert "meshes of 2 ranks fits into 1 KiB" in first["refused"]
    recipe = TrainingRecipe(source="none", data={"train": "none"}, mesh="auto")
    assert TrainingRecipe.model_validate(yaml.safe_load(recipe.to_yaml())) == recipe
    settled, ranks = settle_mesh(recipe, open_meta_model(tmp_path / "llama"), 16, Ranks(), Steps(quiet=True), 2**30)
    assert (settled.mesh, ranks) == (Mesh(), Ranks())
    (going_on, losses), (alone, expected) = ((begin("llama", settled.mesh, (), ranks), []) for _ in range(2))
    with Snapshots(tmp_path / "snapshots") as snapshots:
        losses = resume(going_on, snapshots, make_rows(0))
    assert len(losses) == KEPT
    for state, figures in ((going_on, losses), (alone, expected)):
        learn(state, ranks, figures, [])
    assert losses == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValidationError, match="auto chooses shard, which stands beside it"):
        Mesh(auto=True, shard=2)
