"""Opening the model to fine-tune, with a new classification head where the labels are new."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from laconic import registry
from laconic.data.array_formats import read_npz
from laconic.data.reader import read_values
from laconic.data.row_index import keep_labels
from laconic.errors import DataError, InputError, SourceError
from laconic.models import huggingface, timm_folder
from laconic.models.checkpoint import CARD, Checkpoint, prepare, rebuild
from laconic.models.embedder import MODULES, read_modules
from laconic.models.model_folder import read_source_json
from laconic.models.pretrained import is_head_weight, reset_head
from laconic.models.processors import read_template, resolve_task
from laconic.models.signature import probe_module
from laconic.models.source_loading import CONFIG, find_task, load_model, load_source, make_checkpoint
from laconic.progress import Steps
from laconic.tasks.preprocessing import Preprocessing
from train.settings import TrainingRecipe

LISTED = 10
"""Names of classes that are listed where there are more."""


def open_for(recipe: TrainingRecipe, *, trust: bool = False, steps: Steps | None = None) -> Checkpoint:
    """Open the checkpoint that a recipe trains: with a new head where the labels of its samples are not the model's,
    and with the chat template that the recipe names. steps: where a new head is announced.

    Raises SourceError, UntrustedSource, DataError, UsageError.
    """
    checkpoint = _open_with_head(recipe, trust, steps)
    path = recipe.data.chat_template
    if path is None:
        return checkpoint
    return checkpoint.with_task(checkpoint.task.with_chat_template(read_template(path)))


def _open_with_head(recipe: TrainingRecipe, trust: bool, steps: Steps | None) -> Checkpoint:
    source = Path(recipe.source)
    task = recipe.task or find_task(source)
    # A task that a checkpoint names is taken from the registry alone: an address would import whatever the file names.
    has_head = task is not None and task in registry.TASKS and resolve_task(task).has_class_head
    if task and has_head and recipe.builder is None and source.is_dir():
        labels = labels_of(recipe.data.train, task, recipe.data.columns)
        try:
            return with_labels(source, task, labels, seed=recipe.seed, trust=trust, steps=steps)
        except DataError as error:
            raise DataError(f"{recipe.data.train.name}: {error}") from None
    return load_source(
        source,
        task=recipe.task,
        builder=recipe.builder,
        arguments=recipe.arguments,
        weights_key=recipe.weights_key,
        inputs=recipe.inputs or None,
        samples=read_npz(recipe.data.train) if recipe.builder is not None and not recipe.inputs else None,
        trust=trust,
    )


def with_labels(
    source: Path | Checkpoint,
    task: str,
    labels: Iterable[Any],
    *,
    seed: int = 0,
    trust: bool = False,
    steps: Steps | None = None,
) -> Checkpoint:
    """Return a classifier for these labels: the source unchanged where it has all of them, else with a new head.

    source: a folder of transformers, sentence-transformers or timm, bare or with another head; a saved checkpoint of
    such a classifier, or one in memory. labels: names or numbers of classes, in any order and number. Only the head is
    initialized anew (from the seed), and the pooler where the source has none. Raises SourceError, UntrustedSource,
    DataError.
    """
    values, kind = list(labels), resolve_task(task)
    if isinstance(source, Path) and (source / CARD).is_file():
        source = Checkpoint.load(source, trust=trust)
    if isinstance(source, Checkpoint):
        if source.task.name != task:
            raise SourceError(
                f"the checkpoint is for {source.task.name}, and a head for {task} goes onto the folder that it was "
                f"made from. Train that"
            )
        known = source.task.labels
        names = kind.new_classes(values, known) if known else ()
        announce_head(names, known, steps)
        return _replace_head(source, names, seed) if names else source
    known = read_own_labels(source, task)
    names = kind.new_classes(values, known)
    announce_head(names, known, steps)
    if not names:
        return load_source(source, task=task, trust=trust)
    opened = load_model(source, task=task, trust=trust, labels=names, seed=seed)
    return make_checkpoint(opened, source, head=(names, seed))


def announce_head(names: tuple[str, ...], known: tuple[str, ...], steps: Steps | None) -> None:
    """Say which classes a new head is for, where there is one, and which the model had. known: those, perhaps none."""
    if names and steps is not None:
        before = f"the model's classes are {list_names(known)}" if known else "the model has none for this task"
        steps.warn(
            f"a new head for {len(names)} classes, {list_names(names)}, is trained from random weights: {before}"
        )


def list_names(names: tuple[str, ...]) -> str:
    """List the names of classes, the first ten of many."""
    return ", ".join(names[:LISTED]) + (", ..." if len(names) > LISTED else "")


def _replace_head(checkpoint: Checkpoint, names: tuple[str, ...], seed: int) -> Checkpoint:
    """Return the checkpoint, its history included, with a new head for these classes."""
    if checkpoint.source["kind"] != "huggingface":
        raise SourceError(
            f"the checkpoint answers with the classes {', '.join(checkpoint.task.labels[:20])}, and "
            f"the samples have others. Build it with as many as they have, by the arguments of its builder"
        )
    source = {
        **checkpoint.source,
        "config": huggingface.with_classes(checkpoint.source["config"], names, checkpoint.task.problem_type),
    }
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
    tensors = tuple(spec.name for spec in checkpoint.outputs)
    outputs = probe_module(prepare(module), task.inputs, tensors, task.sample_inputs)
    return checkpoint.derive(module, task, outputs=outputs, source=source)


def read_own_labels(folder: Path, task: str) -> tuple[str, ...]:
    """Read the classes of the head in a folder; empty without a head for the task."""
    if timm_folder.is_timm(folder):
        return timm_folder.read_labels(timm_folder.read_config(folder))
    where = read_modules(folder).encoder if (folder / MODULES).is_file() else folder
    config, kind = read_source_json(where / CONFIG), resolve_task(task)
    name = str((config.get("architectures") or [""])[0])
    if not name.endswith(kind.architectures) or not kind.fits(config):
        return ()
    return huggingface.name_classes(config)


def labels_of(path: Path, task: str, columns: Mapping[str, str] | None = None) -> list[Any]:
    """Read the labels in a file or a folder of samples, as they stand there; of a large one perhaps each once. columns:
    by the task's name of a column, the name in the file. Raises DataError where there are none."""
    kind = resolve_task(task).from_preprocessing(Preprocessing())

    def read_labels() -> list[Any]:
        return [kind.read_row(row.values, file.parent)[1] for file, row in read_values(path, kind, columns)]

    try:
        labels = keep_labels(path, kind, columns or {}, read_labels)
    except InputError as error:
        raise DataError(f"{path.name}: {error}") from None
    if not labels:
        raise DataError(f"{path.name} has no samples to learn from. Give one a row, with its 'label'")
    known = [label for label in labels if label is not None]
    if not known:
        raise DataError(f"{path.name} has no labels to learn from. Give each row {kind.columns[-1]!r}")
    return known
