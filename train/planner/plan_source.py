"""The memory plan of a source, from the options of the command line and a recipe."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from laconic.errors import UsageError
from laconic.hardware import cores
from laconic.registry import trust_addresses
from laconic.units import parse_bytes
from train.parallel.mesh import Mesh
from train.planner.device_rates import measure_rates
from train.planner.memory_plan import MemoryPlan, plan_memory
from train.planner.mesh_plan import Link, MeshPlan, plan_mesh
from train.planner.meta_model import MetaModel, open_meta_model
from train.settings import TrainingRecipe


@dataclass(frozen=True)
class PlannedSource:
    """What is planned. length: tokens. memory: bytes of each device. device: whose speed counts. apart: whether its
    memory is separate from the host's."""

    model: MetaModel
    training: TrainingRecipe
    length: int
    memory: int
    devices: int
    device: torch.device
    apart: bool


def open_planned_source(
    source: Path,
    *,
    memory: str,
    batch: int | None = None,
    length: int | None = None,
    recipe: Path | None = None,
    task: str | None = None,
    builder: str | None = None,
    device: str | None = None,
    devices: int = 1,
    measure: bool = False,
    trust: bool = False,
) -> PlannedSource:
    """Open what is planned.

    memory: of each device, as "8GiB". batch, length, task, builder: override the recipe. recipe: YAML file with the
    settings of training. device: "cpu" or "cuda", to plan for; by default what this machine has. devices: how many
    share the model, sharded unless the recipe has a mesh. measure: measure the device's speed again. trust: whether the
    source may execute code, and the recipe name code.
    Raises SourceError, RecipeError or UsageError for a wrong option.
    """
    size, here = parse_memory(memory), find_device(device)
    overrides = {"batch_size": batch, "task": task, "builder": builder}
    training = load_training(source, recipe, overrides, devices, trust=trust)
    model = open_meta_model(
        source,
        task=training.task,
        builder=training.builder,
        arguments=training.arguments,
        inputs=training.inputs,
        trust=trust,
    )
    most = model.task.planning_length
    asked = length or training.max_length or min(model.longest or most, most)
    if measure:
        measure_rates(here, again=True)
    model = replace(model, preference=training.objective)
    return PlannedSource(model, training, asked, size, devices, here, (device or here.type) == "cuda")


def plan_source(planned: PlannedSource, *, trust: bool = False) -> MemoryPlan:
    """Plan the techniques of the training of a source. Raises RecipeError. trust: whether the recipe may name code."""
    if planned.training.mesh.auto and planned.devices > 1:
        raise UsageError("mesh: auto depends on what connects the devices. Give --link, as --link ethernet")
    with trust_addresses(trust):
        return plan_memory(
            planned.model,
            planned.training,
            length=planned.length,
            memory=planned.memory,
            device=planned.device,
            apart=planned.apart,
            devices=planned.devices,
            workers=cores(),
        )


def plan_source_mesh(planned: PlannedSource, link: Link, *, trust: bool = False) -> MeshPlan:
    """Plan the mesh of the training of a source. Raises RecipeError. trust: whether the recipe may name code."""
    with trust_addresses(trust):
        return plan_mesh(
            planned.model,
            planned.training,
            length=planned.length,
            devices=planned.devices,
            memory=planned.memory,
            link=link,
            device=planned.device,
            apart=planned.apart,
            workers=cores(),
        )


def parse_memory(memory: str) -> int:
    """Parse a size as "8GiB" to bytes. Raises UsageError."""
    try:
        return parse_bytes(memory)
    except ValueError as error:
        raise UsageError(f"memory: {error}") from None


def find_device(name: str | None) -> torch.device:
    """Find the device whose speed counts in a plan for a kind of device, None for any. Raises UsageError."""
    if name not in (None, "cpu", "cuda"):
        raise UsageError(f"device {name!r} is not known; expected cpu or cuda")
    return torch.device("cuda" if torch.cuda.is_available() and name != "cpu" else "cpu")


def load_training(
    source: Path, recipe: Path | None, overrides: Mapping[str, Any], devices: int, *, trust: bool
) -> TrainingRecipe:
    """Load the settings of training that are planned for. overrides: of the recipe; None leaves it as it is."""
    options = {key: value for key, value in overrides.items() if value is not None}
    training = TrainingRecipe.load(recipe, trust=trust, source=str(source), data={"train": "."}, **options)
    if training.mesh.zero is not None and training.mesh.zero < 3:
        raise UsageError(
            f"mesh: zero: {training.mesh.zero} is not predicted: only what FSDP shards, too, as zero: 3 does, is. Set "
            f"zero: 3, or leave zero out"
        )
    if training.mesh.zero is not None:
        return training.model_copy(update={"mesh": Mesh(shard=None)})
    if devices > 1 and training.mesh == Mesh():
        return training.model_copy(update={"mesh": Mesh(shard=None)})
    return training
