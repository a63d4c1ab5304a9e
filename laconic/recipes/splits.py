"""The samples of a run, parted by what they may be used for."""

from dataclasses import dataclass

from laconic.data.dataset import Dataset, read, split
from laconic.errors import DataError
from laconic.recipes.recipe import Recipe
from laconic.tasks.task import Task

SHARES = {"calibrate": 0.3, "choose": 0.25, "judge": 0.45}
"""How one file of samples is parted."""

CHOOSE = 256
PROBE = 32
JUDGE = 400
"""The most samples used to choose by, to measure one layer's harm, and to judge the result with."""

WHERE_COUNTED = {"choose": 1024, "judge": 4000}
"""As many, where right answers are counted: one of 400 is a quarter of a point. Where one answer in thirty turns from
right to wrong or back, the drop is known to 0.6 points with 4,000 samples, to 1.8 with 400."""

MADE_UP = 100
"""Samples that are made up where none are given."""


@dataclass(frozen=True)
class SampleSplits:
    """train: for learning from. calibrate: for looking at. choose: for deciding by; probe: a few of those. judge: for
    the verdict, which a search asks once for each artifact. fingerprints: of each file, by role; none where the samples
    are made up."""

    train: Dataset
    calibrate: Dataset
    choose: Dataset
    probe: Dataset
    judge: Dataset
    fingerprints: dict[str, str]


def split_samples(recipe: Recipe, task: Task) -> SampleSplits:
    """Read and part the samples that a recipe names; where it changes nothing, made-up ones will do.

    Raises DataError for too few, or for a row that does not fit.
    """
    data = recipe.data
    if data.calibrate is None and data.evaluate is None:
        if recipe.stages:
            raise DataError(
                "there are no samples to work with. Give --data a file of them: .jsonl, .csv, .parquet, .npz, .txt"
            )
        return make_samples(task, recipe.seed)
    roles = {"calibrate": data.calibrate, "evaluate": data.evaluate, "train": data.train}
    files = {role: read(path, task) for role, path in roles.items() if path}
    fingerprints = {role: dataset.fingerprint for role, dataset in files.items()}
    train = files.pop("train", None)
    if len(files) == 2:
        rest = SHARES["calibrate"] + SHARES["choose"]
        seen = split(
            files["calibrate"],
            {"calibrate": SHARES["calibrate"] / rest, "choose": SHARES["choose"] / rest},
            recipe.seed,
        )
        parts = seen | {"judge": files["evaluate"].without(files["calibrate"])}
    else:
        parts = split(next(iter(files.values())), SHARES, recipe.seed)
    most = {"choose": CHOOSE, "judge": JUDGE} if recipe.goal.max_drop is None else WHERE_COUNTED
    calibrate = parts["calibrate"].take(data.limit, recipe.seed) if data.limit else parts["calibrate"]
    choose, judge = (parts[role].take(min(count, data.limit or count), recipe.seed) for role, count in most.items())
    if train is not None:
        train = train.without(choose).without(judge)  # what is learned by heart proves nothing
        train = train.take(data.limit, recipe.seed) if data.limit else train
    return SampleSplits(
        train=train or calibrate,
        calibrate=calibrate,
        choose=choose,
        probe=choose.take(PROBE, recipe.seed),
        judge=judge,
        fingerprints=fingerprints,
    )


def make_samples(task: Task, seed: int) -> SampleSplits:
    """What the task makes up: enough to compare answers with, nothing to decide by."""
    parts = split(Dataset.of(task.examples(MADE_UP, seed), task, name="made-up samples"), SHARES, seed)
    return SampleSplits(**parts, train=parts["calibrate"], probe=parts["choose"].take(PROBE, seed), fingerprints={})
