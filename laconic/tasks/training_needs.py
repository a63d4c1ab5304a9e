"""What training needs to know of a task."""

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from laconic.arrays import Array
from laconic.tasks.named_task import NamedTask

if TYPE_CHECKING:  # tasks without images need no Pillow
    from laconic.tasks.image_preprocess import ImagePreprocess

HealingLoss = Literal["hidden-states", "last-hidden-state", "outputs", "probabilities", "similarities", "vectors"]
"""The distillation losses that healing knows."""


def measure_perplexity(loss: float) -> dict[str, float]:
    """Measure the perplexity; a loss of more than 700 is taken as 700, since its exponential is no float."""
    return {"perplexity": math.exp(min(loss, 700.0))}


class TrainingNeeds(NamedTask):
    """What training, healing and pruning need to know of a task."""

    objective: ClassVar[str]
    """The training objective, by its name in the registry."""

    self_supervised: ClassVar[bool] = False
    """Whether the objective learns from samples without labels."""

    learns_preferences: ClassVar[bool] = False
    """Whether samples may be answers of which one is preferred, as objectives for preferences take them."""

    unlabelled_gradient: ClassVar[Literal["likelihood", "answer"]] = "answer"
    """Without labels, importance criteria take the gradient of the likelihood of a class drawn from the model's own
    answer, or of the answer itself."""

    is_trainable: ClassVar[bool] = True
    """Whether models of the task can be fine-tuned, and changed by stages before they are quantized."""

    has_logits: ClassVar[bool] = True
    """Whether the last axis of the first output can hold the logits of classes."""

    planning_length: ClassVar[int] = 512
    """The length of a row for which memory is planned, at most, where the request names none."""

    @property
    def image_preprocess(self) -> "ImagePreprocess | None":
        """How the files of images become the pixels of samples; None for a task whose samples are no images."""
        return None

    def make_sample(self, pixels: Array, size: tuple[int, int]) -> Any:
        """Make the sample that `parse` makes of an image file, from its pixels as `image_preprocess` says.

        pixels: [channels, height, width] float32. size: height and width that the image came with. Raises InputError.
        """
        raise NotImplementedError

    def figures_from_loss(self, loss: float) -> dict[str, float]:
        """Return figures that take the place of the metric, from the objective's mean loss; empty where there are
        none."""
        return {}

    def healing_losses(self, *, layers: bool) -> dict[HealingLoss, float]:
        """Return the distillation losses that heal a compressed model, with their weights.

        layers: whether student and teacher share layers, whose hidden states can be compared.
        """
        return {"hidden-states": 1.0, "outputs": 1.0} if layers else {"outputs": 1.0}
