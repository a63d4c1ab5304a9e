"""Losses and gradient norms of device meshes beside those of one process, as docs/past-one-device.md has them.

    python benchmarks/mesh_losses.py [--models llama gpt2] [--meshes "tensor 2"] [--variants plain]

Ten steps without dropout, rows of unequal numbers of tokens, clipping on, AdamW by foreach. Each figure is the largest
difference from one process, over all steps: of each mesh with each model, of each kind of mesh with all models, and of
each model on all meshes. The ranks are processes of this machine, connected by gloo.
"""

import json
import multiprocessing
import multiprocessing.connection
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from mesh_differences import Difference, find_difference, format_difference, print_digests
from results import Results, make_parser
from torch import nn

from laconic.errors import RecipeError
from laconic.models.language_model import LanguageModel
from laconic.tasks.token_positions import IGNORED
from train.objectives.cross_entropy import TokenCrossEntropy
from train.objectives.next_token import NextToken
from train.parallel.mesh import Mesh
from train.parallel.pipeline import Pipeline, make_pipeline
from train.parallel.ranks import Ranks, open_ranks
from train.settings import Training
from train.step.objective import TARGETS, Batch, Objective
from train.step.train_state import TrainState
from train.step.train_step import train_step
from train.step_assembly import distribute_step, make_step_parts

CPU = torch.device("cpu")
WORDS, ROWS, LENGTH, STEPS, MAX_NORM = 61, 12, 16, 10, 0.5
SIZES = {"hidden_size": 32, "num_attention_heads": 8, "intermediate_size": 48}
LLAMA = SIZES | {"vocab_size": WORDS, "num_key_value_heads": 4, "max_position_embeddings": LENGTH, "pad_token_id": 0}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"n_embd": 32, "n_head": 8, "n_positions": LENGTH, "bos_token_id": 0, "eos_token_id": 0}
UNDROPPED = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def make_llama(layers: int, **changes: Any) -> nn.Module:
    """Build a decoder with rotary positions, and a head of its own unless it is tied."""
    config = transformers.LlamaConfig(**LLAMA, num_hidden_layers=layers, **changes)
    return LanguageModel(transformers.LlamaForCausalLM(config))


def make_gpt2(layers: int) -> nn.Module:
    """Build a decoder whose attention is one fused layer, with a tied head."""
    config = transformers.GPT2Config(vocab_size=WORDS, n_layer=layers, **GPT2, **UNDROPPED)
    return LanguageModel(transformers.GPT2LMHeadModel(config))


def make_bert(layers: int) -> nn.Module:
    """Build an encoder with a tied head over its vocabulary."""
    sizes = SIZES | {"num_hidden_layers": layers, "max_position_embeddings": LENGTH}
    config = transformers.BertConfig(vocab_size=WORDS, **sizes, **STILL)
    model: nn.Module = transformers.BertForMaskedLM(config)
    return model


MODELS: Mapping[str, tuple[Callable[[int], nn.Module], type[Objective]]] = {
    "llama": (make_llama, NextToken),
    "llama, tied": (lambda layers: make_llama(layers, tie_word_embeddings=True), NextToken),
    "bert": (make_bert, TokenCrossEntropy),
    "gpt2": (make_gpt2, NextToken),
}
MESHES: Mapping[str, Mapping[str, Any]] = {
    "tensor 2": {"tensor": 2},
    "tensor 4": {"tensor": 4},
    "tensor 2, sequence": {"tensor": 2, "sequence": True},
    "tensor 4, sequence": {"tensor": 4, "sequence": True},
    "shard 2": {"shard": 2},
    "shard 2 x tensor 2": {"shard": 2, "tensor": 2},
    "shard 2 x tensor 2, sequence": {"shard": 2, "tensor": 2, "sequence": True},
    "replicate 2 x tensor 2": {"replicate": 2, "tensor": 2},
    "context 2": {"context": 2},
    "context 4": {"context": 4},
    "shard 2 x context 2": {"shard": 2, "context": 2},
    "replicate 2 x context 2": {"replicate": 2, "context": 2},
    "pipeline 2, gpipe": {"pipeline": 2, "schedule": "gpipe"},
    "pipeline 2, 1f1b": {"pipeline": 2},
    "pipeline 2, interleaved": {"pipeline": 2, "schedule": "interleaved"},
    "pipeline 2, zbv": {"pipeline": 2, "schedule": "zbv"},
    "pipeline 4, gpipe": {"pipeline": 4, "schedule": "gpipe"},
    "pipeline 4, 1f1b": {"pipeline": 4},
    "pipeline 4, interleaved": {"pipeline": 4, "schedule": "interleaved"},
    "pipeline 4, zbv": {"pipeline": 4, "schedule": "zbv"},
    "shard 2 x pipeline 2": {"shard": 2, "pipeline": 2},
    "replicate 2 x pipeline 2": {"replicate": 2, "pipeline": 2},
    "shard 2 x pipeline 2, interleaved": {"shard": 2, "pipeline": 2, "schedule": "interleaved"},
    "shard 2 x pipeline 2, zbv": {"shard": 2, "pipeline": 2, "schedule": "zbv"},
    "replicate 2 x pipeline 2, interleaved": {"replicate": 2, "pipeline": 2, "schedule": "interleaved"},
    "replicate 2 x pipeline 2, zbv": {"replicate": 2, "pipeline": 2, "schedule": "zbv"},
    "tensor 2 x pipeline 2": {"tensor": 2, "pipeline": 2},
}
ACCUMULATED = {"gradient-accumulation": {"rows": 2}}
VARIANTS: Mapping[str, Sequence[Any]] = {
    "plain": (),
    "accumulation": (ACCUMULATED,),
    "checkpointing": ("gradient-checkpointing", ACCUMULATED),
    "lora": ({"lora": {"rank": 4}}, ACCUMULATED),
    "bf16": ("bf16",),
}
"""Techniques beside the mesh; accumulation takes the rows of a rank two at a time, so in 6, 3 or 2 parts."""


def make_batch(step: int, rank: int, world: int) -> Batch:
    """Make this rank's rows of a batch, of 5 to 16 tokens each."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, WORDS, (ROWS, LENGTH + 1), generator=generator)
    lengths = torch.randint(5, LENGTH + 1, (ROWS,), generator=generator)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    targets = ids[:, 1:].masked_fill(mask == 0, IGNORED)
    batch = {"input_ids": ids[:, :-1] * mask, "attention_mask": mask, TARGETS: targets}
    rows = slice(ROWS * rank // world, ROWS * (rank + 1) // world)
    return {name: tensor[rows] for name, tensor in batch.items()}


def begin_run(model: str, layers: int, techniques: Sequence[Any], mesh: Mapping[str, Any], ranks: Ranks) -> TrainState:
    """Make a run on a mesh, before its first step."""
    make, objective = MODELS[model]
    training = Training.model_validate(
        {
            "mesh": Mesh(**mesh),
            "batch_size": ROWS,
            "techniques": techniques,
            "optimizer": {"adamw": {"lr": 1e-3, "implementation": "foreach"}},
            "max_grad_norm": MAX_NORM,
        }
    )
    torch.manual_seed(0)
    module = make(layers)
    torch.manual_seed(1)
    parts = make_step_parts(
        module,
        objective(None),  # type: ignore[arg-type]
        training.components(),
        CPU,
        sharded=training.mesh.is_sharded,
        tensor=ranks.select_axes("tensor"),
        sequence=training.mesh.sequence,
        context=ranks.context,
        pipeline=make_pipeline(training.mesh, ranks, make_batch(0, ranks.data_rank, ranks.data_world)),
    )
    distribute_step(parts, training, ranks)
    return parts.assemble()


def take_steps(state: TrainState, ranks: Ranks, start: int, stop: int) -> dict[str, list[float]]:
    """Take some steps of a run; returns the loss and the gradient norm of each."""
    losses, norms = [], []
    for step in range(start, stop):
        batch = make_batch(step, ranks.data_rank, ranks.data_world)
        loss = train_step(state, batch, max_grad_norm=MAX_NORM)
        assert loss is not None
        assert state.gradient_norm is not None
        losses.append(float(loss))
        norms.append(float(state.gradient_norm))
    return {"losses": losses, "norms": norms}


def train_mesh(
    model: str, layers: int, techniques: Sequence[Any], mesh: Mapping[str, Any], ranks: Ranks
) -> dict[str, list[float]]:
    """Train a model for some steps; returns the loss and the gradient norm of each, and of a pipeline the micro-batches
    and the bubble."""
    state = begin_run(model, layers, techniques, mesh, ranks)
    figures = take_steps(state, ranks, 0, STEPS)
    cut = [state.strategy.micro_batches, state.strategy.bubble] if isinstance(state.strategy, Pipeline) else []
    return figures | {"pipeline": cut}


Work = Callable[[int, int], dict[str, Any]]
"""What a rank does, from its number and that of all ranks; returns its figures, JSON-ready."""
Case = tuple[str, int, str, str]
"""The name of a model, the number of its layers, the names of a mesh and of a variant."""


def count_layers(mesh: str) -> int:
    """Return the layers of the models of a mesh: two for each of four ranks of a pipeline."""
    return 8 if "pipeline" in MESHES.get(mesh, {}) else 2


def count_ranks(mesh: str) -> int:
    """Return the number of ranks of a mesh."""
    return prod(size for size in MESHES.get(mesh, {}).values() if isinstance(size, int))


@cache
def open_mesh(rank: int, world: int, mesh: str) -> Ranks:
    """Make this rank of a mesh, once in a process: its groups, with their threads, stay until the process ends."""
    return Ranks.of(rank, world, CPU, Mesh(**MESHES.get(mesh, {})))


def train_cases(rank: int, world: int, cases: Sequence[Case]) -> dict[str, Any]:
    """Train all cases on one rank; returns the figures of each."""
    figures: dict[str, Any] = {}
    for model, layers, mesh, variant in cases:
        key = f"{model}/{layers}/{mesh}/{variant}"
        try:
            ranks = open_mesh(rank, world, mesh)
            figures[key] = train_mesh(model, layers, VARIANTS[variant], MESHES.get(mesh, {}), ranks)
        except RecipeError as error:
            figures[key] = {"refused": str(error)}
        except Exception as error:
            if not rank:
                print(f"{key}: {type(error).__name__}: {error}", file=sys.stderr)
            raise
    return figures


def run_rank(rank: int, world: int, port: int, work: Work, folder: Path) -> None:
    """Do the work of one rank in a process group, and write down the figures of the first."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    os.environ |= place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    with open_ranks(CPU, Mesh()):
        figures = work(rank, world)
    if rank == 0:
        (folder / f"{world}.json").write_text(json.dumps(figures))


def run_world(world: int, work: Work, folder: Path) -> dict[str, Any]:
    """Do work on `world` ranks, processes that are forked from one that has imported everything; returns the figures of
    the first rank."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mesh_losses"])
    processes = [context.Process(target=run_rank, args=(rank, world, port, work, folder)) for rank in range(world)]
    for process in processes:
        process.start()
    waiting = [process.sentinel for process in processes]
    while waiting:
        for done in multiprocessing.connection.wait(waiting):
            waiting.remove(done)  # type: ignore[arg-type]
        if any(process.exitcode for process in processes):
            for process in processes:
                process.kill()
    for process in processes:
        process.join()
    figures: dict[str, Any] = json.loads((folder / f"{world}.json").read_text())
    return figures


def main() -> None:
    """Print a table with a row for each model and mesh and a column for each variant, and its digests."""
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    options = parser.parse_args()
    results = Results(publish=options.publish)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pairs = [(model, variant) for model in options.models for variant in options.variants]
        depths = {count_layers(mesh) for mesh in options.meshes}
        references = [(model, layers, "", variant) for model, variant in pairs for layers in depths]
        alone = run_world(1, partial(train_cases, cases=references), folder)
        results.begin("losses", ["model", "mesh", *options.variants])
        differences: dict[tuple[str, str], list[Difference | None]] = {}
        bubbles: dict[tuple[Any, ...], None] = {}
        for mesh in options.meshes:
            layers = count_layers(mesh)
            cases = [(model, layers, mesh, variant) for model, variant in pairs]
            figures = run_world(count_ranks(mesh), partial(train_cases, cases=cases), folder)
            for model in options.models:
                runs = {variant: figures[f"{model}/{layers}/{mesh}/{variant}"] for variant in options.variants}
                differences[model, mesh] = [
                    None if "refused" in run else find_difference(run, alone[f"{model}/{layers}//{variant}"])
                    for variant, run in runs.items()
                ]
                results.add("losses", [model, mesh, *map(format_difference, differences[model, mesh])])
                bubbles |= {(model, mesh, *run["pipeline"]): None for run in runs.values() if run.get("pipeline")}
    print_digests(results, options.variants, differences)
    if bubbles:
        print()
        rows = [[model, mesh, f"{number:.0f}", f"{bubble:.1%}"] for model, mesh, number, bubble in bubbles]
        results.table("bubbles", ["model", "mesh", "micro-batches", "bubble"], rows)


def find_benchmarks() -> None:
    """Let the process that all ranks are forked from import this folder."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


if __name__ == "__main__":
    find_benchmarks()
    main()
