"""Models of transformers that find objects: their module, and how their processor makes scores of logits."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from laconic.errors import SourceError
from laconic.models.pretrained import WrappedModel
from laconic.tasks.detections import Detections, Scoring, find_detections
from laconic.tasks.image_preprocess import ImagePreprocess

SCORINGS = (Scoring(), Scoring(activation="sigmoid", most=100), Scoring(activation="sigmoid"))
"""What processors do: of DETR and YOLOS; of Conditional and Deformable DETR; of RT-DETR."""

QUERIES, CLASSES = 120, 7
"""The size of the outputs by which scores are compared: more queries than any fixed count of objects."""

SCORE_ERROR = 1e-5
"""The largest difference of a score, and of a box in shares of the image."""


DEFORMABLE = "MultiScaleDeformableAttention"
"""The name that transformers gives the class of attention at learned places of several maps."""


class ObjectDetector(WrappedModel):
    """pixel_values, [batch, channels, height, width] float32, to logits [batch, queries, classes] and boxes by centre,
    width and height, [batch, queries, 4].

    For training also a pixel_mask, which not all models take, and targets, [batch, objects, 5], a class and a box each,
    with a negative class where there is none: then the mean loss of the batch, [], is the last output.
    """

    def forward(
        self, pixel_values: Tensor, pixel_mask: Tensor | None = None, targets: Tensor | None = None
    ) -> dict[str, Tensor]:
        inputs: dict[str, Any] = {"pixel_values": pixel_values}
        if pixel_mask is not None and "pixel_mask" in inspect.signature(self.model.forward).parameters:
            inputs["pixel_mask"] = pixel_mask
        if targets is not None:
            objects = [each[each[:, 0] >= 0] for each in targets]
            inputs["labels"] = [{"class_labels": each[:, 0].long(), "boxes": each[:, 1:]} for each in objects]
        answer = self.model(**inputs)
        outputs = {"logits": answer.logits, "boxes": answer.pred_boxes}
        return outputs if targets is None else outputs | {"loss": answer.loss}


def check_sides(model: nn.Module, folder: Path, preprocess: ImagePreprocess) -> None:
    """Raise SourceError for a model that needs inputs of one size, and gets them of any."""
    if preprocess.resize or not any(type(each).__name__ == DEFORMABLE for each in model.modules()):
        return
    raise SourceError(
        f"{folder} holds a {type(model).__name__}, whose attention divides its maps by sizes that a graph must know, "
        f"and the sides of its inputs vary. Give preprocessor_config.json one size, as "
        f'"size": {{"height": 800, "width": 1066}}, and check what the model finds then'
    )


def read_scoring(processor: Any) -> Scoring:
    """Return how an image processor of transformers makes scores of logits, found by what it makes of random ones.

    Raises SourceError for one that does so in another way.
    """
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((QUERIES, CLASSES)).astype(np.float32)
    boxes = rng.random((QUERIES, 4), np.float32)
    expected = post_process(processor, logits, boxes)
    for scoring in SCORINGS:
        if expected is not None and are_alike(expected, find_detections(logits, boxes, scoring)):
            return scoring
    raise SourceError(
        f"preprocessor_config.json is for {type(processor).__name__.removesuffix('Pil')}, and Laconic does not know "
        f"how it makes objects of a model's outputs. Give the model with --builder, as one that answers with plain "
        f"arrays"
    )


def post_process(processor: Any, logits: np.ndarray[Any, Any], boxes: np.ndarray[Any, Any]) -> Detections | None:
    """Return the objects that an image processor of transformers makes of outputs; None where it makes none."""
    outputs = ModelOutput(logits=torch.from_numpy(logits)[None], pred_boxes=torch.from_numpy(boxes)[None])
    try:
        (objects,) = processor.post_process_object_detection(outputs, threshold=0.0, target_sizes=torch.ones(1, 2))
    except (AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError):
        return None
    return Detections(*(objects[name].numpy() for name in ("scores", "labels", "boxes")))


def are_alike(expected: Detections, actual: Detections) -> bool:
    """Return whether two sets hold the same objects in the same order."""
    return all(
        one.shape == other.shape and bool(np.abs(one.astype(np.float64) - other).max() <= SCORE_ERROR)
        for one, other in zip(expected, actual, strict=True)
    )
