"""Meshes are planned without the devices: against ranks that are there, and for a thousand that are not."""

import json
import math
import os

import pytest
import torch
import transformers
from test_fleet import RATES, let_go
from test_parallel import by_two_ranks

from laconic.files import read_json
from laconic.models import huggingface, wrappers
from train.parallel.mesh import Mesh
from train.parallel.pipeline import make_pipeline
from train.parallel.ranks import Ranks, open_ranks
from train.planner.mesh_cases import make_job
from train.planner.mesh_prediction import list_cases, predict_mesh
from train.planner.meta_model import open_meta_model
from train.planner.prediction import sum_categories
from train.planner.simulate import trace_memory
from train.settings import Training
from train.step_assembly import distribute_step, make_step_parts

CPU = torch.device("cpu")
LENGTH, ROWS = 24, 8
MESHES = {
    2: {
        "tensor": {"tensor": 2},
        "pipeline": {"pipeline": 2},
        "gpipe": {"pipeline": 2, "schedule": "gpipe"},
        "interleaved": {"pipeline": 2, "schedule": "interleaved"},
        "zbv": {"pipeline": 2, "schedule": "zbv"},
    },
    4: {
        "pipeline of four": {"pipeline": 4},
        "shard x tensor": {"shard": 2, "tensor": 2},
        "tensor x pipeline": {"pipeline": 2, "tensor": 2},
        "shard x pipeline": {"pipeline": 2, "shard": 2},
        "replicate x tensor": {"replicate": 2, "tensor": 2},
    },
}
"""By the number of ranks."""


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


def measure(folder, training, ranks):
    """What a mesh takes on this rank, on real tensors."""
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
            pipeline=make_pipeline(training.mesh, ranks, batch),
        )
        distribute_step(parts, training, ranks)
        return parts.assemble(), batch

    timeline = trace_memory(prepare, CPU, clip=training.max_grad_norm)
    return timeline.peak()


def measure_each(rank, folder):
    world = int(os.environ["WORLD_SIZE"])
    figures = {}
    for name in ("all_gather_single", "reduce_scatter_single"):
        setattr(torch.distributed, name, let_go(getattr(torch.distributed, name)))  # in a process of the test's own
    with open_ranks(CPU, Mesh()):
        for kind in ("llama", "gpt2"):
            for name, mesh in MESHES[world].items():
                training = settings(mesh)
                figures[f"{kind} {name}"] = measure(folder / kind, training, Ranks.of(rank, world, CPU, training.mesh))
    (folder / f"{world}-{rank}.json").write_text(json.dumps(figures))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("meshes")
    for kind in ("llama", "gpt2"):
        save_config(folder, kind)
    figures = {}
    with pytest.MonkeyPatch.context() as patch:
        for world in MESHES:
            assert by_two_ranks(measure_each, folder, patch, world) == [0] * world
            figures[world] = [json.loads((folder / f"{world}-{rank}.json").read_text()) for rank in range(world)]
    return folder, figures


def predict(subject, training, world, rates=RATES):
    job = make_job(subject, training, LENGTH, rates)
    sizes = training.mesh.resolve(world)
    simulated = {case: job.simulate(case) for case in set(list_cases(job, sizes, training.mesh.schedule))}
    return predict_mesh(job, sizes, training.mesh.schedule, simulated)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(("world", "name"), [(world, name) for world, meshes in MESHES.items() for name in meshes])
def test_the_prediction_is_what_each_rank_measures(kind, world, name, measured):
    folder, figures = measured
    training = settings(MESHES[world][name])
    prediction = predict(open_meta_model(folder / kind), training, world)
    apart = world // len(prediction.ranks)
    for rank, figure in enumerate(figures[world]):
        expected = figure[f"{kind} {name}"]
        found = prediction.ranks[rank // apart]
        assert sum_categories(found) == pytest.approx(expected, rel=0.03)
