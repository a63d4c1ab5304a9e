"""The mesh of a run that leaves it to the planner: chosen for the ranks that have started."""

import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from laconic.errors import LaconicError, RecipeError
from laconic.progress import Steps
from laconic.units import format_binary_bytes, format_bytes
from train.parallel.mesh import Mesh
from train.parallel.ranks import Ranks
from train.planner.device_rates import DeviceRates, measure_optimizer, measure_rates
from train.planner.mesh_plan import Link, describe_mesh, plan_mesh
from train.planner.meta_model import MetaModel
from train.planner.parallel_map import map_in_pool
from train.settings import Training, TrainingRecipe

LINK_BYTES, TRIES = 2**23, 4
"""What is sent to measure the link between the ranks, and how often."""


@dataclass(frozen=True)
class MeshRequest:
    """What a mesh is chosen for. memory: bytes of each rank."""

    model: MetaModel
    training: Training
    length: int
    devices: int
    memory: int
    link: Link
    rates: DeviceRates
    device: str

    def choose(self, number: int = 0) -> tuple[Mesh | None, str]:
        """Choose a mesh; returns it with a line about it, or None and the reason. In a process without a process group,
        since the ranks that are planned need one that is fake."""
        try:
            plan = plan_mesh(
                self.model,
                self.training,
                length=self.length,
                devices=self.devices,
                memory=self.memory,
                link=self.link,
                device=torch.device(self.device),
                steps=Steps(quiet=True),
                rates=self.rates,
            )
        except LaconicError as error:
            return None, str(error)
        budget = format_binary_bytes(self.memory)
        if plan.chosen is None:
            least = min(plan.rows, key=lambda row: row.need)
            return None, (
                f"mesh: auto: none of {len(plan.rows)} meshes of {self.devices} ranks fits into {budget}: the least is "
                f"{format_binary_bytes(least.need)}, with {describe_mesh(least)}. Give techniques, as "
                f"gradient-checkpointing, or more ranks"
            )
        need = format_binary_bytes(plan.chosen.need)
        link = f"{format_bytes(self.link.rate)}/s"
        return plan.chosen.mesh, f"{describe_mesh(plan.chosen)}: {need} of {budget} a rank, the ranks send {link}"


def settle_mesh(
    recipe: TrainingRecipe, model: MetaModel, length: int, ranks: Ranks, steps: Steps, room: int
) -> tuple[TrainingRecipe, Ranks]:
    """Return the recipe with the mesh that the first rank has chosen for all of them, where it is left to the planner,
    and this rank on it. room: bytes that are available to the ranks on this rank's device, or in the host's memory.
    Raises RecipeError where no mesh fits."""
    if not recipe.mesh.auto:
        return recipe, ranks
    if ranks.world == 1:
        return recipe.model_copy(update={"mesh": Mesh()}), ranks
    link = measure_link(ranks)
    choice: list[tuple[Mesh | None, str]] = [(None, "")]
    if ranks.is_first:
        with steps.step("choose the mesh") as step:
            choice = [choose_mesh(recipe, model, length, ranks, link, room)]
            step.note = choice[0][1]
    dist.broadcast_object_list(choice, src=0, device=torch.device("cpu"))
    ((mesh, line),) = choice
    if mesh is None:
        raise RecipeError(line)
    return recipe.model_copy(update={"mesh": mesh}), Ranks.of(ranks.rank, ranks.world, ranks.device, mesh)


def choose_mesh(
    recipe: TrainingRecipe, model: MetaModel, length: int, ranks: Ranks, link: Link, room: int
) -> tuple[Mesh | None, str]:
    """Choose the mesh in another process, by the measured speed of this rank's device and its memory, of which ranks
    on one processor have equal parts."""
    rates = measure_rates(ranks.device)
    measure_optimizer(recipe.components().optimizer, rates)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if ranks.device.type == "cpu" else 1
    memory = recipe.memory or room // here
    training = Training.model_validate({name: getattr(recipe, name) for name in Training.model_fields})
    request = MeshRequest(model, training, length, ranks.world, memory, link, rates, ranks.device.type)
    ((_, choice),) = map_in_pool(request.choose, [0], range(1), 1)
    return choice


def measure_link(ranks: Ranks) -> Link:
    """Measure the bytes a second that each rank sends when all of them sum up a tensor."""
    tensor = torch.zeros(LINK_BYTES // 4, device=ranks.device)
    seconds = []
    for _ in range(TRIES):
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        float(tensor[0])
        seconds.append(time.perf_counter() - begin)
    return Link("measured", 2 * (ranks.world - 1) / ranks.world * LINK_BYTES / min(seconds))
