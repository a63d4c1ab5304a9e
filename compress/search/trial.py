"""Cut and heal a model as some settings say, and see how faithful it still is: a pure function, kept in the cache."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from compress.search.constraints import Figures, figures
from compress.search.layer_spec import Cell, cells
from compress.transform import apply_stages
from export.lineage import Job as SharedJob
from export.lineage import Lineage
from export.sources import as_checkpoint_source, open_source
from laconic.cache import Cache
from laconic.errors import LaconicError
from laconic.hardware import cores
from laconic.hashing import code_version, hash_of
from laconic.models.checkpoint import Checkpoint
from laconic.models.source import Source
from laconic.models.torch_runtime import TorchSession
from laconic.progress import Steps
from laconic.recipes.recipe import Goal, NamedStage, Recipe
from laconic.recipes.splits import Samples, gather
from laconic.recipes.stage import TorchStage, dump_settings
from laconic.runtimes.predict import predict

CELLS = TypeAdapter(tuple[Cell, ...])
BYTES = {True: 1, False: 4}
"""Of a number of a quantized artifact: in a matrix, and in a vector."""


@dataclass(frozen=True)
class Job:
    """recipe: of the candidate, as JSON. cache: folder. threads: of torch."""

    recipe: str
    trust: bool
    cache: str
    threads: int


@dataclass(frozen=True)
class Outcome:
    """figures: of the answers to the samples that are chosen by. cells: the layers now. size: bytes that the weights
    will take in INT8. error: why there is no result, in a sentence."""

    figures: Figures | None = None
    cells: tuple[Cell, ...] = ()
    size: float = 0.0
    error: str = ""


OUTCOME = TypeAdapter(Outcome)


@dataclass(frozen=True)
class Ground:
    """What all candidates of a recipe share."""

    source: Source
    samples: Samples

    @property
    def key(self) -> str:
        """Digest of all of it."""
        parts = (self.samples.train, self.samples.calibrate, self.samples.choose, self.samples.judge)
        return hash_of(self.source.key, self.source.task.name, [part.fingerprint for part in parts])


@lru_cache(maxsize=1)
def ground(origin: str, trust: bool, cache: str) -> Ground:
    """Open the source and the samples of a recipe, given as JSON; once in a process."""
    recipe = Recipe.model_validate_json(origin)
    source = open_source(recipe, Cache(Path(cache)), trust=trust)
    return Ground(source, gather(recipe, source.task))


def origin(recipe: Recipe) -> str:
    """What of a recipe decides upon the source and the samples, the same for all candidates, as JSON."""
    plain = {"stages": (NamedStage(name="quantize.static"),), "goal": Goal(max_drop=recipe.goal.max_drop)}
    return recipe.model_copy(update=plain).model_dump_json()


def attempt(job: Job) -> dict[str, Any]:
    """An Outcome, JSON-ready. Settings that lead nowhere are an outcome too: its error says why."""
    recipe = Recipe.model_validate_json(job.recipe)
    cache = Cache(Path(job.cache))
    base = ground(origin(recipe), job.trust, job.cache)
    stages = [
        (step.name, stage)
        for step, stage in zip(recipe.stages, recipe.make_stages(), strict=True)
        if isinstance(stage, TorchStage)
    ]
    described = [(name, dump_settings(stage)) for name, stage in stages]
    key = hash_of("attempt", base.key, described, recipe.seed, code_version())

    def compute() -> dict[str, Any]:
        try:
            found = tried(recipe, stages, base, cache, job.threads)
        except LaconicError as error:
            found = Outcome(error=str(error))
        return dict(OUTCOME.dump_python(found, mode="json"))

    return dict(cache.json(f"attempt-{key}", compute))


def tried(
    recipe: Recipe, stages: Sequence[tuple[str, TorchStage]], base: Ground, cache: Cache, threads: int
) -> Outcome:
    """What the stages make of the source."""
    task, choose = base.source.task, base.samples.choose
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with tempfile.TemporaryDirectory(prefix="laconic-") as folder:
            lineage = Lineage(base.source, SharedJob(recipe, base.samples, Path(folder), Steps(quiet=True), cache))
            apply_stages(lineage, stages)
    finally:
        torch.set_num_threads(before)
    checkpoint = as_checkpoint_source(lineage.model).checkpoint
    with TorchSession(checkpoint.module, checkpoint.inputs, checkpoint.outputs, cores()) as session:
        found = predict(session, task, choose)
    return Outcome(
        figures(task, lineage.reference(choose), found, choose, recipe.seed), cells(checkpoint), size(checkpoint)
    )


def size(checkpoint: Checkpoint) -> float:
    """Bytes that its weights take in INT8, about."""
    return float(sum(BYTES[each.ndim > 1] * each.numel() for each in checkpoint.module.parameters()))
