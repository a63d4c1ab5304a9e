"""From a recipe of training to a checkpoint that has learned: what `laconic finetune` does."""

import gc
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from laconic.artifacts.record import Record
from laconic.cache import Cache
from laconic.data.dataset import Dataset, read, split
from laconic.errors import OutOfMemory, RecipeError, UsageError
from laconic.finetune.advice import advised, available, fitted, longest, subject_of
from laconic.finetune.evaluate import ROWS, evaluate
from laconic.finetune.head import open_for
from laconic.hashing import code_version, hash_of
from laconic.models.checkpoint import Checkpoint, check_free
from laconic.planner.meta_model import Subject
from laconic.progress import Steps
from laconic.training.loop import short_of_memory
from laconic.training.parallel.ranks import Ranks, started
from laconic.training.settings import Training, TrainingRecipe
from laconic.training.step.parts import Kit
from laconic.training.train import SNAPSHOTS, Taught, Watching, shortened, teach

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
    that fit are taken. auto: also after a step has run out of memory; else OutOfMemory says what to turn on. Under
    torchrun every rank calls it, and the first one writes.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with started(device, recipe.mesh) as ranks:
        if ranks.world > 1 and (auto or recipe.memory is not None):
            raise RecipeError(
                "memory and --auto choose for one device alone, and several ranks were started. Give the techniques"
            )
        steps = (steps or Steps()) if ranks.first else Steps(quiet=True)
        return tune(recipe, destination, ranks, trust, auto, watching, steps, cache or Cache())


def tune(
    recipe: TrainingRecipe,
    destination: Path,
    ranks: Ranks,
    trust: bool,
    auto: bool,
    watching: Watching | None,
    steps: Steps,
    cache: Cache,
) -> Tuned:
    """The same, on one rank."""
    device = ranks.device
    place = destination.resolve()
    check_free(place)
    folder = place.with_name(f"{place.name}.{LOGS}")
    changed: str | None = None
    while True:
        lesson = prepare(recipe, trust, steps)
        if changed is None:
            recipe, changed = fitted(recipe, lesson.subject, lesson.length, device, steps)
            room = available(device)
        checkpoint, learn, judge = lesson.checkpoint, lesson.learn, Judge(lesson, recipe, steps)
        try:
            key = hash_of(checkpoint.key, learn.fingerprint, described(recipe))
            with claimed(folder, key) if ranks.first else nullcontext(), short_of_memory():
                ranks.any(False)  # nobody looks into the folder before it is claimed
                taught = teach(
                    checkpoint, learn, recipe, folder, ranks=ranks, watching=watching, judge=judge, cache=cache
                )
            break
        except OutOfMemory as error:
            said = str(error)
        # Not in the clause above: what was raised holds all that the attempt has held.
        subject, length = lesson.subject, lesson.length
        del lesson, checkpoint, learn, judge
        gc.collect()
        other, advice = advised(recipe, subject, length, device, steps, room)
        if other is None:
            raise OutOfMemory(f"{said}. {advice}")
        if not auto:
            raise OutOfMemory(f"{said}. Turn on: {advice}. --auto does so by itself")
        steps.warn(f"{said}. Turned on: {advice}")
        recipe, changed = other, advice
    tuned = record(checkpoint, taught, recipe, learn, judge.before, judge.after)
    if ranks.first:
        with steps.step("write the checkpoint"):
            publish(tuned, folder, place)
    return Tuned(tuned, destination, judge.before, judge.after, taught, changed)


@dataclass(frozen=True)
class Lesson:
    """checkpoint: to be trained. learn, held: what it learns from and is judged by. subject: its structure alone.
    length: tokens of the longest text."""

    checkpoint: Checkpoint
    learn: Dataset
    held: Dataset
    subject: Subject
    length: int


def prepare(recipe: TrainingRecipe, trust: bool, steps: Steps) -> Lesson:
    """Open what a recipe names. Raises SourceError, UntrustedSource, DataError, UsageError."""
    with steps.step("load the model and the samples") as step, short_of_memory():
        checkpoint = open_for(recipe, trust=trust)
        learn, held = gather(recipe, checkpoint)
        with shortened(checkpoint.task, recipe.length):
            length = longest(checkpoint, learn)
        step.note = f"{checkpoint.task.name}, {len(learn.keys)} rows to learn, {len(held.keys)} to judge by"
    return Lesson(checkpoint, learn, held, subject_of(checkpoint, Path(recipe.source).name), length)


class Judge:
    """Asks the model on the samples that were set aside: on all before and after, on some of them in between.

    It is asked as it is trained, on the device, with its techniques: so it takes no more memory than training does.
    """

    def __init__(self, lesson: Lesson, training: Training, steps: Steps) -> None:
        held = lesson.held
        self._held, self._few = held, held.rows(range(min(SHOWN, len(held.keys))), held.name)
        self._last, self._steps = training.count(len(lesson.learn.keys)), steps
        self._rows = min(ROWS, training.batch)
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}

    def __call__(self, kit: Kit, done: int) -> None:
        if 0 < done < self._last:
            self._steps.report(f"after step {done}", shown(self._ask(kit, self._few)))
            return
        with self._steps.step("judge what it has learned" if done else "judge the model as it is") as step:
            figures = self._ask(kit, self._held)
            step.note = shown(figures)
        if done:
            self.after = figures
        else:
            self.before = figures

    def _ask(self, kit: Kit, held: Dataset) -> dict[str, float]:
        rows = min(self._rows, kit.rows or ROWS)
        with kit.gathered():
            return evaluate(kit.module, kit.objective, held, kit.device, rows=rows, passing=kit.passing)


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


def described(training: Training) -> dict[str, Any]:
    """The settings that decide what is learned, JSON-ready."""
    return training.model_dump(mode="json", include=set(Training.model_fields) - {"feed", "every", "mesh"})


@contextmanager
def claimed(folder: Path, key: str) -> Iterator[None]:
    """The folder is that of this run in the body: what another run has left in it is removed.

    Where the body fails before the first snapshot, there is nothing to go on from, and the folder goes too.
    """
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
    try:
        yield
    except BaseException:
        if not any((folder / SNAPSHOTS).glob("step-*.json")):
            shutil.rmtree(folder, ignore_errors=True)
        raise


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
