"""Spreading a training step over ranks, which train as one on their parts of each batch."""

from math import ceil

from laconic.errors import RecipeError
from laconic.training.parallel.data_parallel import replicate_model
from laconic.training.parallel.fully_sharded import shard_parameters
from laconic.training.parallel.mesh import Mesh
from laconic.training.parallel.ranks import Ranks
from laconic.training.step.step_parts import StepParts


def distribute(parts: StepParts, mesh: Mesh, ranks: Ranks, batch_size: int) -> None:
    """Replicate or shard the model over the ranks. Every rank calls it, after all techniques are applied.

    batch_size: rows of a batch over all ranks, of which each has a part. The loss of a step is the mean over the whole
    batch, and so is its gradient. Raises RecipeError where the task cannot be distributed.
    """
    if not ranks.is_group:
        return
    if not parts.objective.splittable and ranks.world > 1:
        raise RecipeError(
            "mesh: this task compares the rows of a batch with one another, and each rank sees its own alone. Train on "
            "one device"
        )
    rows = parts.micro_batch_rows
    micro_batches = ceil(ceil(batch_size / ranks.world) / rows) if rows else 1
    if ranks.axes is None:
        replicate_model(parts, ranks, micro_batches, mesh.compress)
    else:
        shard_parameters(parts, ranks, micro_batches, mesh)
