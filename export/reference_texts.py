"""Targets for samples without: what the original model writes for them.

A model that writes a text is compared token by token, each behind the target's own earlier tokens. Where samples have
no labels, their targets are the answers of the original itself.
"""

from dataclasses import replace

import numpy as np
import torch

from laconic.arrays import Arrays
from laconic.cache import Cache
from laconic.data.batches import batches
from laconic.data.dataset import Dataset, Samples
from laconic.hashing import environment_digest, hash_of
from laconic.models.pretrained import WritingModel
from laconic.models.source import CheckpointSource, Source
from laconic.progress import Step, Steps
from laconic.recipes.splits import SampleSplits
from laconic.runtimes.predict import ROWS
from laconic.tasks.task import Task

CALIBRATED = 512
"""The most calibration samples that answers are written for: calibration takes fewer."""


def write_reference_texts(samples: SampleSplits, source: Source, cache: Cache, steps: Steps, seed: int) -> SampleSplits:
    """Return the same samples, those that a model is to write an answer for with what the original writes, greedily.
    Answers are cached. For any other model, and for samples with targets, nothing changes."""
    module = source.checkpoint.module if isinstance(source, CheckpointSource) else None
    if not isinstance(module, WritingModel):
        return samples
    calibrate = samples.calibrate.take(CALIBRATED, seed)
    sets = {"calibrate": calibrate, "choose": samples.choose, "probe": samples.probe, "judge": samples.judge}
    lacking = {role: each for role, each in sets.items() if not all(map(source.task.has_target, each.samples))}
    if not lacking:
        return samples
    with steps.step("write answers with the original model", sum(map(len, lacking.values()))) as step:
        datasets = sets | {role: add_answers(each, module, source, cache, step) for role, each in lacking.items()}
    return replace(
        samples,
        train=datasets["calibrate"] if samples.train is samples.calibrate else samples.train,
        calibrate=datasets["calibrate"],
        choose=datasets["choose"],
        probe=datasets["probe"],
        judge=datasets["judge"],
    )


def add_answers(dataset: Dataset, module: WritingModel, source: Source, cache: Cache, step: Step) -> Dataset:
    """Return the dataset with the module's answers as targets."""
    key = hash_of("written", source.key, dataset.fingerprint, environment_digest())
    written = cache.arrays(f"written-{key}", lambda: write_answers(dataset, module, source.task, step))["tokens"]
    targeted = source.task.with_answers(dataset.samples.sources, written)
    return replace(
        dataset, samples=Samples(targeted, source.task.parse), fingerprint=hash_of(dataset.fingerprint, source.key)
    )


def write_answers(dataset: Dataset, module: WritingModel, task: Task, step: Step) -> Arrays:
    """Have the module write an answer for each sample: `tokens` [samples, max_new_tokens] int64, padded."""
    settings = task.reference_settings
    assert settings is not None
    tokens = np.full((len(dataset), settings.max_new_tokens), settings.pad_token_id, np.int64)
    for indices, batch in batches(dataset, task, ROWS):
        source = {spec.name: torch.from_numpy(batch[spec.name]) for spec in task.served_inputs()}
        written = module.generate(source, settings).numpy()
        tokens[indices, : written.shape[1]] = written
        step.advance(len(indices))
    return {"tokens": tokens}
