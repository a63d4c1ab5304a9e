"""Opening the model to fine-tune, with a new classification head where the labels are new."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from laconic import registry
from laconic.data.reader import read_rows
from laconic.data.rows import LABEL
from laconic.errors import DataError, SourceError
from laconic.models import huggingface
from laconic.models.checkpoint import Checkpoint, load_source, read_licence, rebuild
from laconic.models.checkpoint_card import CARD, prepare
from laconic.models.embedder import MODULES, read_modules
from laconic.models.pretrained import is_head_weight, reset_head
from laconic.models.processors import resolve_task
from laconic.models.signature import probe_module
from laconic.models.source_json import read_source_json
from laconic.tasks.classification import find_class
from laconic.tasks.preprocessing import Preprocessing
from laconic.training.settings import TrainingRecipe

SPARSE = 10
"""Numeric labels whose highest is at least so many times their count are names, not indices of classes."""
CONFIG = "config.json"


def open_for(recipe: TrainingRecipe, *, trust: bool = False) -> Checkpoint:
    """The checkpoint that a recipe trains, with a new head where the labels of its samples are not the model's.

    Raises SourceError, UntrustedSource, DataError.
    """
    source = Path(recipe.source)
    task = recipe.task or task_of(source)
    # A task that a checkpoint names is taken from the registry alone: an address would import whatever the file names.
    has_head = task is not None and task in registry.TASKS and resolve_task(task).has_class_head
    if task and has_head and recipe.builder is None and source.is_dir():
        labels = labels_of(recipe.data.train, task)
        return with_labels(source, task, labels, seed=recipe.seed, trust=trust)
    return load_source(
        source,
        task=recipe.task,
        builder=recipe.builder,
        arguments=recipe.arguments,
        inputs=recipe.inputs or None,
        trust=trust,
    )


def with_labels(
    source: Path | Checkpoint, task: str, labels: Iterable[Any], *, seed: int = 0, trust: bool = False
) -> Checkpoint:
    """A classifier for these labels: the source unchanged where it has all of them, else with a new head.

    source: a folder of transformers or sentence-transformers, bare or with another head; a saved checkpoint of such a
    classifier, or one in memory. labels: names or numbers of classes, in any order and number. Only the head is
    initialized anew (from the seed), and the pooler where the source has none. Raises SourceError, UntrustedSource,
    DataError.
    """
    wanted = set(labels)
    if isinstance(source, Path) and (source / CARD).is_file():
        source = Checkpoint.load(source, trust=trust)
    if isinstance(source, Checkpoint):
        if source.task.name != task:
            raise SourceError(
                f"the checkpoint is for {source.task.name}, and a head for {task} goes onto the folder that it was "
                f"made from. Train that"
            )
        known = source.task.labels
        return source if not known or are_known(wanted, known) else _replace_head(source, class_names(wanted), seed)
    if are_known(wanted, read_own_labels(source, task)):
        return load_source(source, task=task, trust=trust)
    names = class_names(wanted)
    found = huggingface.load(source, task=task, trust=trust, labels=names, seed=seed)
    return Checkpoint.of(
        found.module,
        found.task,
        outputs=probe_module(prepare(found.module), found.task.inputs, (found.output,)),
        source=found.source,
        size=found.size,
        licence=read_licence(source),
    )


def _replace_head(checkpoint: Checkpoint, names: tuple[str, ...], seed: int) -> Checkpoint:
    """The checkpoint, its history included, with a new head for these classes."""
    if checkpoint.source["kind"] != "huggingface":
        raise SourceError(
            f"the checkpoint answers with the classes {', '.join(checkpoint.task.labels[:20])}, and "
            f"the samples have others. Build it with as many as they have, by the arguments of its builder"
        )
    source = {**checkpoint.source, "config": huggingface.with_classes(checkpoint.source["config"], names)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module: Any = rebuild(source, checkpoint.history)
        shapes = {name: value.shape for name, value in module.state_dict().items()}
        kept = {name: value for name, value in checkpoint.module.state_dict().items() if value.shape == shapes[name]}
        module.load_state_dict(kept, strict=False)
        reset_head(module.model, len(names))
    lost = [
        name for name in shapes if name not in kept and not is_head_weight(module.model, name.removeprefix("model."))
    ]
    if lost:
        raise SourceError(f"the head of this model cannot be replaced alone: {', '.join(lost[:3])} would be random")
    task = checkpoint.task.with_labels(names)
    return Checkpoint.of(
        module,
        task,
        outputs=probe_module(prepare(module), task.inputs, tuple(spec.name for spec in checkpoint.outputs)),
        source=source,
        size=checkpoint.size,
        history=checkpoint.history,
        licence=checkpoint.licence,
    )


def task_of(source: Path) -> str | None:
    """The task of a transformers folder or a saved checkpoint; None for anything else."""
    if (source / CARD).is_file():
        return str(read_source_json(source / CARD).get("task"))
    if (source / CONFIG).is_file() and not (source / MODULES).is_file():
        return huggingface.infer_task(source, read_source_json(source / CONFIG))
    return None


def read_own_labels(folder: Path, task: str) -> tuple[str, ...]:
    """The classes of the head in a folder; empty without a head for the task."""
    where = read_modules(folder).encoder if (folder / MODULES).is_file() else folder
    config = read_source_json(where / CONFIG)
    name = str((config.get("architectures") or [""])[0])
    other = config.get("problem_type") in ("regression", "multi_label_classification")
    if other or not name.endswith(resolve_task(task).architectures):
        return ()
    return huggingface.read_labels(config) or tuple(map(str, range(config.get("num_labels", 2))))


def labels_of(path: Path, task: str) -> list[Any]:
    """The labels in a file or a folder of samples, as they stand there. Raises DataError where there are none."""
    labels = [row.values.get(LABEL) for row in read_rows(path, resolve_task(task).from_preprocessing(Preprocessing()))]
    if not labels:
        raise DataError(f"{path.name} has no samples to learn from. Give one a row, with its 'label'")
    found = [label for label in labels if label is not None]
    if not found:
        raise DataError(f"{path.name} has no labels for a classifier to learn from. Give each row a 'label'")
    for label in found:
        if not isinstance(label, (str, int)):
            raise DataError(f"{path.name}: label {label!r} is no class; expected a name, or a whole number")
    return found


def are_known(labels: Iterable[Any], known: Sequence[str]) -> bool:
    """Whether each label is a class of a model that has these."""
    try:
        return len(known) > 1 and all(find_class(label, known) >= 0 for label in labels)
    except DataError:
        return False


def class_names(labels: Iterable[Any]) -> tuple[str, ...]:
    """The classes of a new head: the sorted names, or one class for each number from 0 to the highest."""
    names = {str(label) for label in labels}
    numbers = [isinstance(label, int) and not isinstance(label, bool) for label in labels]
    if any(numbers) and not all(numbers):
        raise DataError(f"labels are names or numbers, not both: {', '.join(sorted(names)[:20])}")
    if len(names) < 2:
        raise DataError(f"all samples have the label {''.join(names)!r}, so there is nothing to tell apart")
    if not all(name.isdecimal() for name in names):
        if any(numbers):
            raise DataError(f"classes are numbered from 0, and one label is {min(map(int, names))}. Give names instead")
        return tuple(sorted(names))
    highest = max(map(int, names))
    if highest < SPARSE * len(names):
        return tuple(map(str, range(highest + 1)))
    if any(numbers):
        raise DataError(f"{len(names)} labels go up to {highest}: classes are numbered from 0. Give names instead")
    return tuple(sorted(names, key=int))
