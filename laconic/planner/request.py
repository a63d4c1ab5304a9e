"""From what the command line asks to a plan."""

from pathlib import Path

import torch

from laconic.errors import UsageError
from laconic.planner.memory_plan import Plan, plan
from laconic.planner.meta_model import open_subject
from laconic.tasks.image_classification import ImageClassification
from laconic.training.parallel.mesh import Mesh
from laconic.training.settings import TrainingRecipe
from laconic.units import parse_bytes

LENGTH = 512
"""Tokens of a row, where neither the request nor the model says."""


def request(
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
    trust: bool = False,
) -> Plan:
    """The plan for a source. recipe: of training; what is given here stands above it. device: "cpu" or "cuda", to plan
    for; by default what is here. devices: that share the model, by shards unless the recipe has a mesh.

    Raises SourceError, RecipeError or UsageError for what is wrong with the request.
    """
    try:
        size = parse_bytes(memory)
    except ValueError as error:
        raise UsageError(f"memory: {error}") from None
    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"device {device!r} is not known; expected cpu or cuda")
    given = {"source": str(source), "data": {"train": "."}, "batch_size": batch, "task": task, "builder": builder}
    training = TrainingRecipe.load(recipe, **{key: value for key, value in given.items() if value is not None})
    if devices > 1 and training.mesh == Mesh():
        training = training.model_copy(update={"mesh": Mesh(shard=None)})
    subject = open_subject(
        source,
        task=training.task,
        builder=training.builder,
        arguments=training.arguments,
        inputs=training.inputs,
        trust=trust,
    )
    here = torch.device("cuda" if torch.cuda.is_available() and device != "cpu" else "cpu")
    apart = here.type == "cuda" if device is None else device == "cuda"
    least = 1 if subject.task.name == ImageClassification.name else LENGTH
    asked = length or training.max_length or min(subject.longest or least, LENGTH)
    return plan(subject, training, length=asked, memory=size, device=here, apart=apart, devices=devices)
