"""From a recipe of training to a checkpoint that has learned: what `laconic finetune` does."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from laconic import registry
from laconic.cache import Cache
from laconic.checkpoint import Checkpoint
from laconic.data import Dataset, read, split
from laconic.errors import OutOfMemory, UsageError
from laconic.planner.advice import advised, fitted, longest, subject_of
from laconic.progress import Steps
from laconic.record import Record, code_version, hash_of
from laconic.training.evaluate import evaluate
from laconic.training.head import open_for
from laconic.training.kit import Kit
from laconic.training.objective import Objective
from laconic.training.settings import Training, TrainingRecipe
from laconic.training.teach import SNAPSHOTS, Taught, Watching, teach

HELD = 0.1
"""The share of the data that is set aside to judge by, where no file is given for that."""
KEY = "run.json"
LOGS = "training"
SHOWN = 512
"""Samples that the model is judged by after each epoch; at the end it is by all."""


@dataclass(frozen=True)
class Tuned:
    """before, after: figures on the samples set aside. changed: what was turned on beside the recipe, to fit."""

    checkpoint: Checkpoint
    folder: Path
    before: Mapping[str, float]
    after: Mapping[str, float]
    taught: Taught
    changed: str


def finetune(
    recipe: TrainingRecipe,
    destination: Path,
    *,
    device: torch.device | None = None,
    trust: bool = False,
    auto: bool = False,
    watching: Watching | None = None,
    steps: Steps | None = None,
    cache: Cache | None = None,
) -> Tuned:
    """Train as the recipe says, and write the checkpoint to `destination`, whole or not at all.

    An interrupted run goes on from its last snapshot. Where the recipe names a memory and no techniques, the fastest
    that fit are taken. auto: also after a step has run out of memory; else OutOfMemory says what to turn on.
    """
    steps, cache = steps or Steps(), cache or Cache()
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = destination.with_name(f"{destination.name}.{LOGS}")
    with steps.step("load the model and the samples") as step:
        checkpoint = open_for(recipe, trust=trust)
        if recipe.length is not None:
            shorten(checkpoint, recipe.length)
        learn, held = gather(recipe, checkpoint)
        step.note = f"{checkpoint.task.name}, {len(learn.keys)} rows to learn, {len(held.keys)} to judge by"
    subject, length = subject_of(checkpoint, Path(recipe.source).name), longest(checkpoint, learn)
    training, changed = fitted(recipe, subject, length, device, steps)
    objective: Objective = registry.resolve("objective", checkpoint.task.name).of(checkpoint.task, learn)
    few = held.rows(range(min(SHOWN, len(held.keys))), held.name)
    with steps.step("judge the model as it is") as step:
        before = evaluate(checkpoint.module, checkpoint.task, objective, held, device)
        step.note = shown(before)
    claim(folder, hash_of(checkpoint.key, learn.fingerprint, described(training)))

    def each_epoch(kit: Kit, epoch: int) -> None:
        figures = evaluate(kit.module, checkpoint.task, kit.objective, few, device)
        steps.say(f"epoch {epoch}", shown(figures))

    try:
        taught = teach(
            checkpoint,
            learn,
            training,
            folder,
            device=device,
            objective=objective,
            watching=watching,
            each_epoch=each_epoch,
            cache=cache,
        )
    except OutOfMemory as error:
        other, advice = advised(training, subject, length, device, steps)
        if not auto or other is None:
            raise OutOfMemory(f"{error}. {advice}") from error
        steps.warn(f"{error}. {advice}")
        shutil.rmtree(folder, ignore_errors=True)
        return finetune(
            other, destination, device=device, trust=trust, auto=True, watching=watching, steps=steps, cache=cache
        )
    with steps.step("judge what it has learned") as step:
        after = evaluate(taught.module, checkpoint.task, objective, held, device)
        step.note = shown(after)
    tuned = record(checkpoint, taught, training, learn, before, after)
    with steps.step("write the checkpoint"):
        publish(tuned, folder, destination)
    return Tuned(tuned, destination, before, after, taught, changed)


def gather(recipe: TrainingRecipe, checkpoint: Checkpoint) -> tuple[Dataset, Dataset]:
    """What is learned from, and what is judged by. Raises DataError."""
    data = recipe.data
    learn = read(data.train, checkpoint.task)
    if data.evaluate is not None:
        held = read(data.evaluate, checkpoint.task)
        learn = learn.without(held)
    else:
        parts = split(learn, {"learn": 1 - HELD, "held": HELD}, recipe.seed)
        learn, held = parts["learn"], parts["held"]
    if data.limit is not None:
        learn, held = learn.take(data.limit, recipe.seed), held.take(data.limit, recipe.seed)
    return learn, held


def shorten(checkpoint: Checkpoint, length: int) -> None:
    """Cut texts at so many tokens. Raises UsageError for a model that reads none, or not so many."""
    task: Any = checkpoint.task
    limit = getattr(task, "max_tokens", None)
    if limit is None:
        raise UsageError(f"length is for texts, and this model is for {task.name}. Leave it out")
    if length > limit:
        raise UsageError(f"the model takes at most {limit} tokens, and length is {length}")
    task.tokenizer.enable_truncation(length)


def described(training: Training) -> dict[str, Any]:
    """The settings that decide what is learned, JSON-ready."""
    return training.model_dump(mode="json", include=set(Training.model_fields) - {"feed", "every"})


def claim(folder: Path, key: str) -> None:
    """Make the folder that of this run: what another run has left in it is removed."""
    card = folder / KEY
    try:
        same = json.loads(card.read_text(encoding="utf-8"))["key"] == key
    except (OSError, ValueError, KeyError, TypeError):
        same = False
    if not same:
        if folder.exists() and not card.is_file() and any(folder.iterdir()):
            raise UsageError(f"{folder} exists and is not a run's: it will not be removed. Choose another --output")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        card.write_text(json.dumps({"key": key}) + "\n", encoding="utf-8")


def record(
    checkpoint: Checkpoint,
    taught: Taught,
    training: Training,
    learn: Dataset,
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> Checkpoint:
    """The checkpoint with one more record in its history."""
    config = described(training)
    figures = {f"{name} before": value for name, value in before.items()} | {
        f"{name} after": value for name, value in after.items()
    }
    key = hash_of(checkpoint.key, "finetune", config, code_version(), learn.fingerprint)
    return checkpoint.after(Record(stage="finetune", config=config, key=key, figures=figures), taught.module)


def publish(checkpoint: Checkpoint, folder: Path, destination: Path) -> None:
    """Save the checkpoint with the logs of its training beside it, and remove the run's folder."""
    checkpoint.save(destination)
    shutil.rmtree(folder / SNAPSHOTS, ignore_errors=True)
    (folder / KEY).unlink(missing_ok=True)
    shutil.move(folder, destination / LOGS)


def shown(figures: Mapping[str, float]) -> str:
    """Figures as people read them."""
    return ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
