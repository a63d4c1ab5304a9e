"""Fine-tuning: from a training recipe to a trained checkpoint, as `laconic finetune` does it."""

import gc
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch

from laconic.artifacts.record import Record
from laconic.cache import Cache
from laconic.data.dataset import Dataset, split
from laconic.data.reader import read
from laconic.errors import OutOfMemory, RecipeError, SourceError, UsageError
from laconic.hardware import return_freed_memory
from laconic.hashing import environment_digest, hash_of
from laconic.models.adapter import Adapter
from laconic.models.checkpoint import Checkpoint, check_free
from laconic.models.quantized_weights import share_float_weights
from laconic.models.source_loading import load_source
from laconic.progress import Steps
from laconic.registry import trust_addresses
from train.callbacks.callback import Callback, RunDescription, RunLog
from train.callbacks.run_estimate import format_estimate
from train.callbacks.thread_balance import balance_threads
from train.finetune.advice import advise, copy_structure, fit_to_memory, measure_available, measure_longest
from train.finetune.class_weights import compute_class_weights
from train.finetune.evaluator import BEST, Evaluator
from train.finetune.head import open_for
from train.finetune.mesh_choice import settle_mesh
from train.finetune.run_folder import KEY, claim_folder
from train.finetune.technique_costs import report_costs
from train.loop import translate_memory_errors
from train.objectives.choice import make_objective
from train.observers import ObserverSettings
from train.parallel.ranks import Ranks, open_ranks
from train.parallel.shared_folder import share_folder
from train.planner.meta_model import MetaModel
from train.precision import settle_precision
from train.reference_rows import REFERENCE
from train.settings import BF16_PADDING, Training, TrainingRecipe
from train.step.objective import Objective
from train.trainer import SNAPSHOTS, TrainResult, train

VALIDATION_SHARE = 0.1
"""The share of the data that is held out as the validation set, where no file is given for it."""
FORWARD_SHARE = 1 / 3
"""Of the time of a step: a backward pass takes twice as long as the forward pass, which is all of an evaluation."""
LOGS = "training"


@dataclass(frozen=True)
class FinetuneResult:
    """The outcome of fine-tuning. before, after: figures on the validation set. training: losses and more. changed: the
    techniques that were added to the recipe so that it fits into memory; empty for none."""

    checkpoint: Checkpoint
    folder: Path
    before: Mapping[str, float]
    after: Mapping[str, float]
    training: TrainResult
    changed: str


def finetune(
    recipe: TrainingRecipe,
    destination: Path,
    *,
    device: torch.device | None = None,
    trust: bool = False,
    auto: bool = False,
    observers: ObserverSettings | None = None,
    steps: Steps | None = None,
    cache: Cache | None = None,
) -> FinetuneResult:
    """Train a checkpoint as the recipe says, and write it to `destination`, completely or not at all.

    An interrupted run is resumed from its last snapshot. Where the recipe has a memory limit and no techniques, the
    fastest combination that fits is chosen. auto: choose another one when a step runs out of memory; else OutOfMemory
    says which to turn on. trust: whether the source may execute code, and the recipe name code. Under torchrun every
    rank calls it, and the first one writes.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with trust_addresses(trust), open_ranks(device, recipe.mesh) as ranks:
        if ranks.world > 1 and (auto or (recipe.memory is not None and not recipe.mesh.auto)):
            raise RecipeError(
                "memory and --auto choose for one device alone, and several ranks were started. Give the techniques, "
                "or mesh: auto"
            )
        steps = (steps or Steps()) if ranks.is_first else Steps(quiet=True)
        return finetune_on_rank(recipe, destination, ranks, trust, auto, observers, steps, cache or Cache())


def finetune_on_rank(
    recipe: TrainingRecipe,
    destination: Path,
    ranks: Ranks,
    trust: bool,
    auto: bool,
    observers: ObserverSettings | None,
    steps: Steps,
    cache: Cache,
) -> FinetuneResult:
    """Fine-tune on one rank of a run; arguments as of `finetune`."""
    final = destination.resolve()
    check_free(final)
    folder = final.with_name(f"{final.name}.{LOGS}")
    changed: str | None = None
    while True:
        inputs = prepare(recipe, trust, ranks, steps, cache)
        if changed is None:
            named = [technique.name for technique in recipe.techniques]
            if recipe.techniques or recipe.memory is None:  # else the planner chooses the precision
                recipe = settle_precision(recipe, inputs.checkpoint.module, ranks, cache, steps)
            room = measure_available(ranks.device)
            recipe, ranks = settle_mesh(recipe, inputs.structure, inputs.length, ranks, steps, room)
            if ranks.world > 1:
                changed = ""
            else:
                recipe, changed = fit_to_memory(recipe, inputs.structure, inputs.length, ranks.device, steps)
                report_costs(recipe, named, inputs.structure, inputs.length, ranks.device, steps)
        try:
            result, evaluator = run_training(inputs, recipe, folder, ranks, observers, cache, steps)
            break
        except OutOfMemory as error:
            reason = str(error)
        # Outside the except clause: the exception keeps alive everything that the attempt has allocated.
        structure, length = inputs.structure, inputs.length
        del inputs
        gc.collect()
        other, advice = advise(recipe, structure, length, ranks.device, steps, room)
        if other is None:
            raise OutOfMemory(f"{reason}. {advice}")
        if not auto:
            raise OutOfMemory(f"{reason}. Turn on: {advice}. --auto does so by itself")
        steps.warn(f"{reason}. Turned on: {advice}")
        recipe, changed = other, advice
    checkpoint = add_record(inputs, result, recipe, evaluator)
    if ranks.is_first:
        with steps.step("write the checkpoint"):
            publish(checkpoint, folder, final, result.adapter, recipe)
    return FinetuneResult(checkpoint, destination, evaluator.before, evaluator.after, result, changed)


@dataclass(frozen=True)
class FinetuneInputs:
    """checkpoint: the model to train. objective: its loss. train, validation: the data. structure: the model without
    weights, for predictions of its memory. length: tokens of the longest text, as padded in BF16."""

    checkpoint: Checkpoint
    objective: Objective
    train: Dataset
    validation: Dataset
    structure: MetaModel
    length: int


def prepare(recipe: TrainingRecipe, trust: bool, ranks: Ranks, steps: Steps, cache: Cache) -> FinetuneInputs:
    """Open the model and the data of a recipe. Raises SourceError, UntrustedSource, DataError, UsageError."""
    with (
        steps.step("load the model and the samples") as step,
        translate_memory_errors(),
        share_folder(ranks, cache) as shared,
        nullcontext() if shared is None else share_float_weights(Cache(shared)),
    ):
        checkpoint = open_for(recipe, trust=trust, steps=steps)
        check_adapter(recipe, checkpoint, trust)
        train_set, validation = read_datasets(recipe, checkpoint, steps)
        objective = make_objective(checkpoint.task, train_set, preference=recipe.objective)
        weights = compute_class_weights(recipe.class_weights, checkpoint.task, train_set)
        objective.set_class_weights(weights, recipe.label_smoothing)
        with checkpoint.task.truncated(recipe.max_length):
            train_set, validation = (objective.prepare_rows(dataset) for dataset in (train_set, validation))
            with checkpoint.task.padded(BF16_PADDING):
                length = measure_longest(checkpoint, train_set)
        step.note = f"{checkpoint.task.name}, {len(train_set.keys)} training and {len(validation.keys)} validation rows"
    structure = copy_structure(checkpoint, Path(recipe.source).name, recipe.objective)
    return_freed_memory()
    return FinetuneInputs(checkpoint, objective, train_set, validation, structure, length)


def run_training(
    inputs: FinetuneInputs,
    recipe: TrainingRecipe,
    folder: Path,
    ranks: Ranks,
    observers: ObserverSettings | None,
    cache: Cache,
    steps: Steps,
) -> tuple[TrainResult, Evaluator]:
    """Train in the folder of this run, and evaluate. Raises OutOfMemory, and what `train` raises."""
    key = make_run_key(inputs, recipe)
    claim = claim_folder(folder, key, inputs.validation.fingerprint, steps) if ranks.is_first else nullcontext()
    with claim, translate_memory_errors():
        ranks.any(False)  # a barrier: no rank reads the folder before it is claimed
        techniques = {named.name for named in recipe.techniques}
        with open_logs(recipe, folder, key, ranks) as logs, balance_threads(ranks.device, techniques) as balances:
            evaluator = Evaluator(inputs.validation, recipe, folder, steps, is_first=ranks.is_first, logs=logs)
            every = recipe.eval_every or ceil(len(inputs.train.keys) / recipe.batch_size)

            def report_pace(seconds: float, left: int) -> None:
                evaluating = evaluator.count_rows_to_come(left, every) * FORWARD_SHARE * seconds / recipe.batch_size
                steps.report("estimated time", format_estimate(seconds, left, evaluating))

            def report_start(done: int) -> None:
                snapshot = f"from the snapshot after step {done}, {folder / SNAPSHOTS}"
                steps.report("resume" if done else "start", snapshot if done else "from the first step, no snapshot")

            result = train(
                inputs.checkpoint,
                inputs.train,
                recipe,
                folder,
                ranks=ranks,
                objective=inputs.objective,
                observers=replace(observers or ObserverSettings(), report_pace=report_pace, report_start=report_start),
                evaluate=evaluator,
                eval_every=recipe.eval_every,
                conclude=evaluator.conclude,
                cache=cache,
                logs=[*logs, *balances],
            )
        return result, evaluator


@contextmanager
def open_logs(recipe: TrainingRecipe, folder: Path, key: str, ranks: Ranks) -> Iterator[list[RunLog]]:
    """Open what the callbacks of the recipe log to, on the first rank; closed after the body."""
    run = RunDescription(folder, select_settings(recipe), key)
    with ExitStack() as stack:
        logs: list[RunLog] = []
        for named in recipe.callbacks if ranks.is_first else ():
            logs.append(named.configure("callback", Callback).open(run))
            stack.callback(logs[-1].close)
        yield logs


def read_datasets(recipe: TrainingRecipe, checkpoint: Checkpoint, steps: Steps) -> tuple[Dataset, Dataset]:
    """Read the training set and the validation set of a recipe. Raises DataError."""
    data = recipe.data
    files = [read(path, checkpoint.task, data.columns) for path in (data.train, data.evaluate) if path is not None]
    for note in dict.fromkeys(dataset.left_out for dataset in files if dataset.left_out):
        steps.warn(note)
    train_set, *others = files
    if others:
        validation = others[0]
        train_set = train_set.without(validation)
    else:
        # The names of the parts are part of the hash that splits the rows.
        parts = split(train_set, {"learn": 1 - VALIDATION_SHARE, "held": VALIDATION_SHARE}, recipe.seed)
        train_set, validation = parts["learn"], parts["held"]
    if data.limit is not None:
        train_set, validation = train_set.take(data.limit, recipe.seed), validation.take(data.limit, recipe.seed)
    return train_set, validation


def select_settings(recipe: TrainingRecipe) -> dict[str, Any]:
    """Select the settings that the trained weights depend on, JSON-ready."""
    names = set(Training.model_fields) - {"loader", "snapshot_every", "mesh"}
    if recipe.best_by is not None:
        names |= {"best_by", "eval_every", "patience"}
    unset = {name for name in ("freeze", "layer_decay", "ema") if not getattr(recipe, name)}
    names |= {name for name in ("class_weights", "label_smoothing", "objective") if getattr(recipe, name)}
    settings = recipe.model_dump(mode="json", include=names - unset)
    return settings | recipe.loader.model_dump(mode="json", include={"image_backend"}, exclude_defaults=True)


def make_run_key(inputs: FinetuneInputs, recipe: TrainingRecipe) -> str:
    """Return the digest of what a run trains, on what and how; a run with another one starts from the beginning.

    Code and libraries are left out: a run of days goes on after an upgrade.
    """
    judged = [inputs.validation.fingerprint] if recipe.best_by else []
    return hash_of(inputs.checkpoint.key, inputs.train.fingerprint, select_settings(recipe), *judged)


def add_record(inputs: FinetuneInputs, result: TrainResult, recipe: TrainingRecipe, evaluator: Evaluator) -> Checkpoint:
    """Return the trained checkpoint, with a record of the training in its history."""
    config = select_settings(recipe)
    figures = {f"{name} before": value for name, value in evaluator.before.items()} | {
        f"{name} after": value for name, value in evaluator.after.items()
    }
    if evaluator.best is not None:
        figures["best step"] = evaluator.best
    if result.skipped:
        figures["skipped batches"] = result.skipped
    key = hash_of(inputs.checkpoint.key, "finetune", config, environment_digest(), inputs.train.fingerprint)
    return inputs.checkpoint.after(Record(stage="finetune", config=config, key=key, figures=figures), result.module)


def check_adapter(recipe: TrainingRecipe, checkpoint: Checkpoint, trust: bool) -> None:
    """Raise UsageError where the recipe keeps adapters apart from a model that cannot be opened again without them: a
    single file, or one whose head is new."""
    if not any(technique.keeps_adapter for technique in recipe.components().techniques.values()):
        return
    source = Path(recipe.source)
    if not source.is_dir():
        raise UsageError(f"merge: false keeps adapters for a model's folder, and {source} is none. Leave it out")
    if not checkpoint.task.has_class_head:
        return
    try:
        same = load_source(source, task=checkpoint.task.name, trust=trust).task.labels == checkpoint.task.labels
    except SourceError:
        same = False
    if not same:
        raise UsageError(
            f"merge: false keeps adapters apart from {source}, which has no head for these labels. Leave it out, or "
            f"train the head first"
        )


def publish(
    checkpoint: Checkpoint, folder: Path, destination: Path, adapter: Adapter | None, recipe: TrainingRecipe
) -> None:
    """Save the checkpoint, or the adapter that is kept apart, with its training's logs; remove the run's folder."""
    if adapter is None:
        checkpoint.save(destination)
    else:
        adapter.save(destination, Path(recipe.source), recipe.data.chat_template)
    for name in (SNAPSHOTS, BEST, REFERENCE):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / KEY).unlink(missing_ok=True)
    shutil.move(folder, destination / LOGS)
