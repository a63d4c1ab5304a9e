"""The samples of a run, split by what they may be used for."""

from dataclasses import dataclass

from laconic.data.dataset import Dataset, split
from laconic.data.reader import make_dataset, read
from laconic.errors import DataError
from laconic.recipes.recipe import Recipe
from laconic.tasks.task import Task

SHARES = {"calibrate": 0.3, "choose": 0.25, "judge": 0.45}
"""The shares into which one file of samples is split."""

CHOOSE = 256
PROBE = 8
JUDGE = 400
"""The most samples used to choose by, to measure the sensitivity of a layer, and to validate the result. Eight rank
layers as 32 do: the ranks of MiniLM's layers correlate by 0.988."""

WHERE_COUNTED = {"choose": 1024, "judge": 4000}
"""As many, where right answers are counted: one of 400 is a quarter of a point. Where one answer in thirty turns from
right to wrong or back, the drop is known to 0.6 points with 4,000 samples, to 1.8 with 400."""

FEW = 30
"""Fewer samples to judge by are reported: 30 give a share of right answers to 18 points either way."""

MADE_UP = 100
"""Synthetic samples where none are given."""


@dataclass(frozen=True)
class SampleSplits:
    """Disjoint datasets by purpose.

    train: for healing. calibrate: for statistics. choose: to compare candidates on; probe: a few of those. judge: for
    the verdict, used once for each artifact of a search. Without a file for training, train is calibrate. fingerprints:
    of each file, by role; empty for synthetic samples.
    """

    train: Dataset
    calibrate: Dataset
    choose: Dataset
    probe: Dataset
    judge: Dataset
    fingerprints: dict[str, str]


def split_samples(recipe: Recipe, task: Task) -> SampleSplits:
    """Read and split the samples that a recipe names. A recipe without stages needs none: samples are synthetic then.

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
    files = {role: read(path, task, data.columns) for role, path in roles.items() if path}
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
    check_labels(judge, task, recipe.goal.max_drop)
    return SampleSplits(
        train=train or calibrate,
        calibrate=calibrate,
        choose=choose,
        probe=choose.take(PROBE, recipe.seed),
        judge=judge,
        fingerprints=fingerprints,
    )


def check_labels(judge: Dataset, task: Task | type[Task], max_drop: float | None) -> None:
    """Raise DataError where a metric is limited that the samples to judge by cannot give: without labels, or with one
    class alone."""
    if max_drop is not None and judge.labels is None:
        raise DataError(
            f"the goal limits the drop of a metric (max_drop), and {judge.name} has no labels. Give labelled samples; "
            f"where the label's column has another name: --column label=NAME"
        )
    classes = {str(label) for label in judge.labels or ()}
    if max_drop is not None and task.has_class_head and len(classes) == 1 and len(judge) > 1:
        raise DataError(
            f"all labels of {judge.name} are of one class: a model that answers nothing else would be right. Give "
            f"samples of at least two classes, or leave out max_drop"
        )


def describe_uncertainty(judge: Dataset) -> str | None:
    """A sentence where the samples to judge by are too few to tell much, else None."""
    count = len(judge)
    if count >= FEW:
        return None
    return (
        f"{count} samples judge the result: a share of right answers is known to {98 / count**0.5:.0f} points either "
        f"way (95 %), and rare mistakes are not seen. Give at least {round(FEW / SHARES['judge'])} samples in one file"
    )


def make_samples(task: Task, seed: int) -> SampleSplits:
    """Splits of synthetic samples of the task: enough to compare answers on, not to choose by."""
    parts = split(make_dataset(task.examples(MADE_UP, seed), task, name="made-up samples"), SHARES, seed)
    return SampleSplits(**parts, train=parts["calibrate"], probe=parts["choose"].take(PROBE, seed), fingerprints={})
