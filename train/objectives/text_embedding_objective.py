"""Which objective of text embedding the data are for."""

from laconic.data.dataset import Dataset
from laconic.errors import DataError
from laconic.tasks.task import Task
from train.objectives.contrastive import Contrastive
from train.objectives.cosent import CoSent
from train.objectives.ranking import Ranking
from train.step.objective import Objective


class TextEmbeddingObjective(Ranking):
    """Pairs that belong together, unless the data are something else."""

    @classmethod
    def of(cls, task: Task, dataset: Dataset | None = None) -> Objective:
        """Choose by order for scored pairs, by rank for pairs without scores or of the score 1 alone, by class for
        texts."""
        if dataset is None:
            return Ranking(task)
        if dataset.per_row == 2:
            scores = set(dataset.labels or (1.0,))
            if len(scores) == 1 and scores != {1.0}:
                raise DataError(
                    f"all pairs of {dataset.name} have the score {scores.pop():g}: none is more alike than another. "
                    f"Give pairs of several scores, or the score 1 to pairs that belong together"
                )
            return CoSent(task) if len(scores) > 1 else Ranking(task)
        if dataset.labels is None:
            raise DataError(
                f"{dataset.name} holds single samples without labels, which teach an embedding nothing. Give each row "
                f"a 'label', or pairs as 'text1' and 'text2'"
            )
        if len({str(label) for label in dataset.labels}) == 1:
            raise DataError(
                f"all samples of {dataset.name} have the label {dataset.labels[0]!r}. Give samples of several classes"
            )
        return Contrastive(task)
