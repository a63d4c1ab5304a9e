"""The memory of a rank that has a part of the positions of its rows, as docs/past-one-device.md has it.

    python benchmarks/context_memory.py

Bytes of all tensors at the peak of the second step of a small Llama with long rows, counted on the rank that has the
most, beside those that `laconic plan` predicts, and what the rank sends in a step. The ranks are along `context`:
processes of this machine, connected by gloo.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from mesh_losses import find_benchmarks, run_world
from results import Results, make_parser
from torch import Tensor

from laconic.models.language_model import LanguageModel
from train.objectives.next_token import NextToken
from train.parallel.collective_traffic import TrafficCounter, name_groups
from train.parallel.mesh import Mesh
from train.parallel.ranks import Ranks
from train.planner.simulate import fakify, open_fake_process_group, simulate, trace_memory
from train.settings import Training
from train.step.objective import TARGETS, Batch
from train.step.train_state import TrainState
from train.step.train_step import train_step
from train.step_assembly import distribute_step, make_step_parts

CPU = torch.device("cpu")
ROWS, LENGTH = 2, 4096
LLAMA = {
    **{"vocab_size": 512, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "pad_token_id": 0},
}
VARIANTS: Mapping[str, Sequence[Any]] = {"none": (), "`gradient-checkpointing`": ("gradient-checkpointing",)}
WORLDS = (1, 2, 4)


def prepare(training: Training, ranks: Ranks, *, is_fake: bool = False) -> tuple[TrainState, Batch]:
    """Make a training state and a batch of full rows."""
    torch.manual_seed(0)
    with torch.device("meta" if is_fake else "cpu"):
        module = LanguageModel(transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)))
    objective: Any = NextToken(None)  # type: ignore[arg-type]
    parts = make_step_parts(
        fakify(module) if is_fake else module, objective, training.components(), CPU, context=ranks.context
    )
    distribute_step(parts, training, ranks)
    ids: Tensor = torch.ones((ROWS, LENGTH), dtype=torch.int64)
    return parts.assemble(), {"input_ids": ids, TARGETS: ids.clone()}


def count(techniques: Sequence[Any], ranks: Ranks, mesh: Mesh) -> list[float]:
    """Count the bytes at the peak and those that are sent, on the rank that has the most."""
    training = Training.model_validate({"mesh": mesh, "batch_size": ROWS, "techniques": techniques})
    made: list[Any] = []

    def make() -> tuple[TrainState, Batch]:
        made.extend(prepare(training, ranks))
        return made[0], made[1]

    timeline = trace_memory(make, CPU, clip=training.max_grad_norm)
    with TrafficCounter(name_groups(ranks), ranks.world) as traffic:
        train_step(made[0], made[1], max_grad_norm=training.max_grad_norm)
    figures = torch.tensor([timeline.peak(), traffic.sent])
    if ranks.world > 1:
        dist.all_reduce(figures, dist.ReduceOp.MAX)
    values: list[float] = figures.tolist()
    return values


def predict(techniques: Sequence[Any], world: int, mesh: Mesh) -> int:
    """Predict the bytes at the peak, without other ranks."""
    training = Training.model_validate({"mesh": mesh, "batch_size": ROWS, "techniques": techniques})
    with open_fake_process_group(world):
        ranks = Ranks.of(0, world, CPU, mesh) if world > 1 else Ranks()
        return simulate(lambda: prepare(training, ranks, is_fake=True), clip=training.max_grad_norm).peak()


def count_variants(rank: int, world: int) -> dict[str, list[float]]:
    """Count the bytes of a rank with each set of techniques."""
    mesh = Mesh(context=world)
    ranks = Ranks.of(rank, world, CPU, mesh) if world > 1 else Ranks()
    return {name: count(techniques, ranks, mesh) for name, techniques in VARIANTS.items()}


def main() -> None:
    """Print a row for each set of techniques and number of ranks."""
    results = Results(publish=make_parser(__doc__).parse_args().publish)
    with tempfile.TemporaryDirectory() as folder:
        counted = {world: run_world(world, count_variants, Path(folder)) for world in WORLDS}
    results.begin("context", ["techniques", "`context`", "counted", "predicted", "sent in a step"])
    for name, techniques in VARIANTS.items():
        for world in WORLDS:
            peak, sent = counted[world][name]
            sizes = (peak, predict(techniques, world, Mesh(context=world)), sent)
            results.add("context", [name, str(world), *(f"{size / 2**20:.1f} MiB" if size else "0" for size in sizes)])


if __name__ == "__main__":
    find_benchmarks()
    main()
