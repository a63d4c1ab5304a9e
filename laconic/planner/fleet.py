"""How much memory each of many ranks takes: predicted by one process, nothing allocated and nothing sent."""

import torch

from laconic.errors import RecipeError
from laconic.planner.meta_model import Subject
from laconic.planner.prediction import Prediction, predict
from laconic.planner.rates import Rates
from laconic.planner.simulate import imagined_group
from laconic.training.parallel.ranks import Ranks
from laconic.training.settings import Training


def predict_fleet(
    subject: Subject, training: Training, length: int, rates: Rates, world: int, *, whole: bool = False
) -> Prediction:
    """What the first of `world` ranks takes, which has as much as any; `training.batch_size` rows are those of all.

    Its time is that of the computation alone: how long gradients travel depends on what connects the ranks. whole: as
    in `predict`. Raises RecipeError where the mesh does not fit so many ranks, or there are fewer rows than ranks.
    """
    if training.batch_size < world:
        raise RecipeError(
            f"a batch of {training.batch_size} rows cannot be shared by {world} ranks. Give each rank a row at least"
        )
    with imagined_group(world):
        ranks = Ranks.of(0, world, torch.device("cpu"), training.mesh)
        return predict(subject, training, length, rates, whole=whole, ranks=ranks)
