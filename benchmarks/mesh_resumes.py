"""Losses and gradient norms of runs that go on from a snapshot of another mesh, as docs/past-one-device.md has them.

    python benchmarks/mesh_resumes.py [--models llama gpt2] [--variant plain] [--meshes "tensor 2" "shard 2"]

Every mesh trains for five steps and writes a snapshot, from which every mesh takes five more, as one process that is
not interrupted takes them. Models, rows and settings are those of benchmarks/mesh_losses.py.
"""

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mesh_differences import Difference, find_difference, find_largest, format_difference
from mesh_losses import (
    MESHES,
    MODELS,
    STEPS,
    VARIANTS,
    begin_run,
    count_layers,
    count_ranks,
    find_benchmarks,
    make_batch,
    open_mesh,
    run_world,
    take_steps,
)
from results import Results, make_parser

from laconic.errors import RecipeError
from train.optimizers.schedule import Constant
from train.parallel.ranks import Ranks
from train.run_snapshot import resume, save_snapshot
from train.snapshots.snapshot import Snapshots
from train.step.train_state import TrainState

ALONE = "one process"
CHOSEN = (
    ALONE,
    "shard 2",
    "tensor 2",
    "tensor 2, sequence",
    "pipeline 2, 1f1b",
    "pipeline 2, interleaved",
    "pipeline 2, zbv",
    "tensor 4",
    "pipeline 4, gpipe",
    "pipeline 4, zbv",
    "shard 2 x tensor 2",
    "replicate 2 x tensor 2",
    "shard 2 x pipeline 2",
    "replicate 2 x pipeline 2",
    "tensor 2 x pipeline 2",
)
"""One mesh of each kind."""
KINDS = ("losses", "norms")
KEPT, LIMIT = STEPS // 2, 1e-5
LAYERS = max(map(count_layers, MESHES))


def begin(model: str, variant: str, mesh: str, rank: int, world: int) -> tuple[TrainState, Ranks]:
    """Make a run on a mesh, before its first step."""
    settings = MESHES.get(mesh, {})
    ranks = open_mesh(rank, world, mesh) if world > 1 else Ranks()
    state = begin_run(model, LAYERS, VARIANTS[variant], settings, ranks)
    state.scheduler = Constant().build(state.optimizer, STEPS)
    return state, ranks


def write(rank: int, world: int, *, model: str, variant: str, meshes: Sequence[str], folder: Path) -> dict[str, Any]:
    """Train on each mesh, and write a snapshot on the way; returns the figures of the steps after it."""
    figures: dict[str, Any] = {}
    for mesh in meshes:
        try:
            state, ranks = begin(model, variant, mesh, rank, world)
        except RecipeError as error:
            figures[mesh] = {"refused": str(error)}
            continue
        losses = take_steps(state, ranks, 0, KEPT)["losses"]
        with Snapshots(folder / mesh) as snapshots:
            save_snapshot(snapshots, state, losses, wait=True)
        figures[mesh] = take_steps(state, ranks, KEPT, STEPS)
    return figures


def go_on(
    rank: int, world: int, *, model: str, variant: str, meshes: Sequence[str], sources: Sequence[str], folder: Path
) -> dict[str, Any]:
    """Go on with each mesh from the snapshots of all; returns the figures of the steps after."""
    figures: dict[str, Any] = {}
    for mesh in meshes:
        for source in sources:
            state, ranks = begin(model, variant, mesh, rank, world)
            with Snapshots(folder / source) as snapshots:
                losses = resume(state, snapshots, make_batch(0, ranks.data_rank, ranks.data_world))
            assert len(losses) == KEPT
            figures.setdefault(source, {})[mesh] = take_steps(state, ranks, KEPT, STEPS)
    return figures


def compare(model: str, variant: str, meshes: Sequence[str], folder: Path) -> dict[str, dict[str, Difference]]:
    """Run all pairs of meshes with a model; returns the differences of each mesh that goes on, by the mesh that wrote
    the snapshot. A mesh that refuses the model has none."""
    worlds: dict[int, list[str]] = {}
    for mesh in meshes:
        worlds.setdefault(count_ranks(mesh), []).append(mesh)
    written: dict[str, Any] = {}
    for world, own in worlds.items():
        written |= run_world(world, partial(write, model=model, variant=variant, meshes=own, folder=folder), folder)
    able = [mesh for mesh in meshes if "refused" not in written[mesh]]
    differences: dict[str, dict[str, Difference]] = {source: {} for source in meshes}
    for world, own in worlds.items():
        own = [mesh for mesh in own if mesh in able]
        work = partial(go_on, model=model, variant=variant, meshes=own, sources=able, folder=folder)
        for source, by_mesh in run_world(world, work, folder).items():
            for mesh, figures in by_mesh.items():
                differences[source][mesh] = find_difference(figures, written[ALONE])
    return differences


def main() -> None:
    """Print a row for each model and mesh that wrote a snapshot, and one for each mesh with all models."""
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--variant", default="plain", choices=list(VARIANTS))
    parser.add_argument("--meshes", nargs="+", default=list(CHOSEN[1:]), choices=list(MESHES))
    options = parser.parse_args()
    results = Results(publish=options.publish)
    results.begin("resumes", ["model", "snapshot of", f"within {LIMIT:g}", "largest difference", "of the mesh"])
    largest: dict[str, list[str]] = {mesh: [] for mesh in (ALONE, *options.meshes)}
    for model in options.models:
        with tempfile.TemporaryDirectory() as name:
            differences = compare(model, options.variant, list(largest), Path(name))
        for mesh, pairs in differences.items():
            largest[mesh].append(format_difference(find_largest(pairs.values())))
            within = sum(max(pair) <= LIMIT for pair in pairs.values())
            worst = max(pairs, key=lambda other: max(pairs[other]), default="")
            results.add("resumes", [model, mesh, f"{within} of {len(pairs)}", largest[mesh][-1], worst])
    print()
    results.table("meshes", ["snapshot of", *options.models], [[mesh, *cells] for mesh, cells in largest.items()])


if __name__ == "__main__":
    find_benchmarks()
    main()
