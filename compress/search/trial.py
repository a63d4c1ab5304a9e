"""Trial: prune and heal a model with some settings, and measure its quality. A pure function, cached."""

import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from compress.search.constraints import measure_quality
from compress.search.results import OUTCOME, TrialOutcome
from compress.search.spec_reader import read_layer_specs
from compress.search.trial_job import SearchContext, TrialJob
from compress.transform import apply_stages
from export.lineage import Lineage
from export.sources import as_checkpoint_source, open_source
from laconic.cache import Cache
from laconic.errors import LaconicError
from laconic.hardware import cores
from laconic.hashing import environment_digest, hash_of
from laconic.models.checkpoint import Checkpoint
from laconic.progress import Steps
from laconic.recipes.goal import Goal
from laconic.recipes.job import Job
from laconic.recipes.recipe import NamedStage, Recipe
from laconic.recipes.splits import split_samples
from laconic.recipes.stage import TorchStage, describe_stage
from laconic.registry import trust_addresses
from laconic.runtimes.predict import predict

MATRIX_BYTES, VECTOR_BYTES = 1, 4
"""Bytes of a number in a matrix (INT8) and in a vector (FP32) of a quantized artifact."""


@lru_cache(maxsize=1)
def open_context(base_recipe: str, trust: bool, cache: str) -> SearchContext:
    """Open the source and the samples of a recipe (JSON), once in a process."""
    recipe = Recipe.model_validate_json(base_recipe)
    source = open_source(recipe, Cache(Path(cache)), trust=trust, samples=recipe.data.calibrate)
    return SearchContext(source, split_samples(recipe, source.task))


def make_base_recipe(recipe: Recipe) -> str:
    """The part of a recipe that the source and the samples depend on, the same for all candidates, as JSON."""
    plain = {"stages": (NamedStage(name="quantize.static"),), "goal": Goal(max_drop=recipe.goal.max_drop)}
    return recipe.model_copy(update=plain).model_dump_json()


def run_trial(job: TrialJob) -> dict[str, Any]:
    """Run a trial; returns a TrialOutcome, JSON-ready. Where a stage fails, the outcome has its error."""
    with trust_addresses(job.trust):
        return run_trusted_trial(job)


def run_trusted_trial(job: TrialJob) -> dict[str, Any]:
    """Run a trial whose recipe may name code by its address as far as the job is trusted."""
    recipe = Recipe.model_validate_json(job.recipe)
    cache = Cache(Path(job.cache))
    context = open_context(make_base_recipe(recipe), job.trust, job.cache)
    stages = [
        (step.name, stage)
        for step, stage in zip(recipe.stages, recipe.make_stages(), strict=True)
        if isinstance(stage, TorchStage)
    ]
    described = [describe_stage(name, stage) for name, stage in stages]
    key = hash_of("attempt", context.key, described, recipe.seed, environment_digest())

    def compute() -> dict[str, Any]:
        try:
            found = compress_and_evaluate(recipe, stages, context, cache, job.threads)
        except LaconicError as error:
            found = TrialOutcome(error=str(error))
        return dict(OUTCOME.dump_python(found, mode="json"))

    return dict(cache.json(f"attempt-{key}", compute))


def compress_and_evaluate(
    recipe: Recipe, stages: Sequence[tuple[str, TorchStage]], context: SearchContext, cache: Cache, threads: int
) -> TrialOutcome:
    """Apply the stages to the source, and measure the result before quantization."""
    task, choose = context.source.task, context.samples.choose
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with tempfile.TemporaryDirectory(prefix="laconic-") as folder:
            job = Job(recipe, context.samples, Path(folder), Steps(quiet=True), cache)
            lineage = Lineage(context.source, job)
            apply_stages(lineage, stages)
    finally:
        torch.set_num_threads(before)
    checkpoint = as_checkpoint_source(lineage.model).checkpoint
    with lineage.model.open(cores()) as session:
        found = predict(session, task, choose)
    return TrialOutcome(
        quality=measure_quality(task, lineage.reference(choose), found, choose, recipe.seed),
        specs=read_layer_specs(checkpoint),
        size=estimate_size(checkpoint),
    )


def estimate_size(checkpoint: Checkpoint) -> float:
    """Estimated bytes of a checkpoint's weights in INT8."""
    parameters = checkpoint.module.parameters()
    return float(sum((MATRIX_BYTES if each.ndim > 1 else VECTOR_BYTES) * each.numel() for each in parameters))
