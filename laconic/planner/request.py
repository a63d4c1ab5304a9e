"""From what the command line asks to a plan."""

from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from laconic.errors import RecipeError, UsageError
from laconic.planner.plan import Plan, plan
from laconic.planner.subject import open_subject
from laconic.recipe import explain, read_yaml
from laconic.training.settings import Training
from laconic.units import parse_bytes

LENGTH = 512
"""Tokens of a row, where neither the request nor the model says."""


def request(
    source: Path,
    *,
    memory: str,
    batch: int,
    length: int | None = None,
    recipe: Path | None = None,
    task: str | None = None,
    builder: str | None = None,
    device: str | None = None,
    trust: bool = False,
) -> Plan:
    """The plan for a source. device: "cpu" or "cuda", to plan for; by default what is here.

    Raises SourceError, RecipeError or UsageError for what is wrong with the request.
    """
    try:
        size = parse_bytes(memory)
    except ValueError as error:
        raise UsageError(f"memory: {error}") from None
    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"device {device!r} is not known; expected cpu or cuda")
    training = settings(recipe, batch)
    subject = open_subject(source, task=task, builder=builder, trust=trust)
    here = torch.device("cuda" if torch.cuda.is_available() and device != "cpu" else "cpu")
    apart = here.type == "cuda" if device is None else device == "cuda"
    asked = length or training.length or min(subject.longest or 1, LENGTH)
    return plan(subject, training, length=asked, memory=size, device=here, apart=apart)


def settings(recipe: Path | None, batch: int) -> Training:
    """The settings of training in a recipe, with this batch. Raises RecipeError."""
    content: dict[str, Any] = read_yaml(recipe) if recipe else {}
    kept = {key: value for key, value in content.items() if key in Training.model_fields}
    try:
        training = Training.model_validate(kept | {"batch": batch})
        training.parts()
    except ValidationError as error:
        raise RecipeError(explain(error, str(recipe or "command line"))) from None
    return training
