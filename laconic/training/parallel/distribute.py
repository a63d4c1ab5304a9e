"""One kit on each of several ranks, that learn as one from their parts of each batch."""

from math import ceil

from laconic.errors import RecipeError
from laconic.training.parallel.data_parallel import replicate
from laconic.training.parallel.fully_sharded import shard
from laconic.training.parallel.ranks import Ranks
from laconic.training.settings import Training
from laconic.training.step.legality import check
from laconic.training.step.parts import Kit


def spread(kit: Kit, training: Training, ranks: Ranks) -> None:
    """Put the mesh of the settings into a kit, after all techniques and before it is assembled. Every rank calls it.

    A rank has part of each batch, of `training.batch` rows over all. The loss that a step gives is the mean over the
    whole batch, and so is its gradient. Raises RecipeError where mesh, techniques, optimizer or task do not fit.
    """
    mesh = training.mesh
    if ranks.world == 1 and ranks.axes is None:
        return
    parts = training.parts()
    check(parts.techniques, parts.optimizer, clip=training.clip, way=mesh.way)
    if not kit.objective.splits and ranks.world > 1:
        raise RecipeError(
            "mesh: this task compares the rows of a batch with one another, and each rank sees its own alone. Train on "
            "one device"
        )
    # Of each batch all ranks take as many parts, since each part is a round of collectives.
    kit.parts = ceil(ceil(training.batch / ranks.world) / kit.rows) if kit.rows else 1
    kit.total, kit.average, kit.any = ranks.total, ranks.average, ranks.any
    if ranks.axes is None:
        replicate(kit, mesh.compress)
    else:
        shard(kit, mesh, ranks.axes)
