"""The samples of a run, split by what they may be used for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from laconic.artifacts.verdict import FEW
from laconic.data.dataset import Dataset, split
from laconic.data.near_copies import group_near_copies
from laconic.data.reader import make_dataset, read
from laconic.errors import DataError
from laconic.recipes.goal import Goal
from laconic.recipes.recipe import Recipe
from laconic.tasks.task import Task

SHARES = {"calibrate": 0.3, "choose": 0.25, "judge": 0.45}
"""The shares into which one file of samples is split."""

PROBE = 8
"""Samples that the sensitivity of a layer is measured with. Eight rank layers as 32 do: the ranks of MiniLM's layers
correlate by 0.988."""

MOST = {"choose": 256, "judge": 400}
"""The most samples used to choose by, and to validate the result."""

LABELLED = {"choose": 256, "judge": 2000}
"""The most samples where there are labels. If one answer in thirty changes between right and wrong, 2,000 samples show
the drop of a metric to 0.8 points either way, 400 to 1.7."""

WHERE_ASKED = {"choose": 1024, "judge": 4000}
"""The most samples where the goal limits the drop of a metric, which 4,000 show to 0.6 points."""

MADE_UP = 100
"""Synthetic samples where none are given."""


TestPart = Literal["all", "rehearsal", "final"]
"""Which of the test samples judge: all of them; or, where several artifacts are judged to choose one, a half for that,
and the other for the one that was chosen."""


@dataclass(frozen=True)
class SampleSplits:
    """Disjoint datasets by purpose.

    train: for healing. calibrate: for statistics. choose: to compare candidates on; probe: a few of those. judge: for
    the verdict, and which part of the test samples they are. Without a file for training, train is calibrate.
    fingerprints: of each file, by role; empty for synthetic samples. copies: how many rows of these files are copies or
    near copies of others. left_out: a sentence for each folder with files that are no samples.
    """

    train: Dataset
    calibrate: Dataset
    choose: Dataset
    probe: Dataset
    judge: Dataset
    fingerprints: dict[str, str]
    copies: int = 0
    left_out: tuple[str, ...] = ()
    part: TestPart = "all"


def split_samples(recipe: Recipe, task: Task, part: TestPart = "all") -> SampleSplits:
    """Read and split the samples that a recipe names. A recipe without stages needs none: samples are synthetic then.

    part: of the test samples, for the verdict. Raises DataError for too few, or for a row that does not fit.
    """
    data = recipe.data
    if data.calibrate is None and data.evaluate is None:
        if recipe.stages:
            raise DataError(
                "there are no samples to work with. Give --data a file: .jsonl, .csv, .parquet, .tar, .npz, .txt"
            )
        return make_samples(task, recipe.seed)
    roles = {"calibrate": data.calibrate, "evaluate": data.evaluate, "train": data.train}
    files = {role: read(path, task, data.columns, sketched=True) for role, path in roles.items() if path}
    fingerprints = {role: dataset.fingerprint for role, dataset in files.items()}
    files = dict(zip(files, group_near_copies(*files.values()), strict=True))
    left_out = tuple(dict.fromkeys(dataset.left_out for dataset in files.values() if dataset.left_out))
    groups = [group for dataset in files.values() for group in dataset.copies]
    train = files.pop("train", None)
    parts = divide_files(files, recipe.seed)
    calibrate = parts["calibrate"].take(data.limit, recipe.seed) if data.limit else parts["calibrate"]
    most = find_most(parts["judge"], recipe.goal, part)
    choose, judge = (parts[role].take(min(count, data.limit or count), recipe.seed) for role, count in most.items())
    if train is not None:
        train = train.without(choose).without(judge)  # what is learned by heart proves nothing
        train = train.take(data.limit, recipe.seed) if data.limit else train
    if part != "all":
        judge = split(judge, {"rehearsal": 0.5, "final": 0.5}, recipe.seed)[part]
    check_labels(judge, task, recipe.goal.max_drop)
    return SampleSplits(
        train=train or calibrate,
        calibrate=calibrate,
        choose=choose,
        probe=choose.take(PROBE, recipe.seed),
        judge=judge,
        fingerprints=fingerprints,
        copies=len(groups) - len(set(groups)),
        left_out=left_out,
        part=part,
    )


def divide_files(files: Mapping[str, Dataset], seed: int) -> dict[str, Dataset]:
    """Divide one file, or one to calibrate with and one to evaluate on, by what the samples are for."""
    if len(files) == 1:
        return split(next(iter(files.values())), SHARES, seed)
    rest = SHARES["calibrate"] + SHARES["choose"]
    shares = {role: SHARES[role] / rest for role in ("calibrate", "choose")}
    return split(files["calibrate"], shares, seed) | {"judge": files["evaluate"].without(files["calibrate"])}


def find_most(judge: Dataset, goal: Goal, part: TestPart) -> dict[str, int]:
    """Return the most samples to choose and to judge by; twice as many of the latter where they are used in two
    halves."""
    most = MOST if judge.labels is None else LABELLED if goal.max_drop is None else WHERE_ASKED
    return most if part == "all" else most | {"judge": 2 * most["judge"]}


def check_labels(judge: Dataset, task: Task, max_drop: float | None) -> None:
    """Raise DataError where a metric is limited that the samples to judge by cannot give: without labels, or with one
    class alone; for perplexity, without a text of several tokens."""
    if max_drop is not None and task.label_samples(judge.samples, judge.labels) is None:
        if task.measures_perplexity:
            raise DataError(
                f"the goal limits the loss of perplexity (max_drop), and no text of {judge.name} has a token behind "
                f"its first. Give longer texts"
            )
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
    """Return a sentence where the samples to judge by are too few for a verdict, else None."""
    count = len(judge)
    if count >= FEW:
        return None
    return (
        f"{count} samples judge the result: the verdict will be inconclusive at best, since what happens to one sample "
        f"in ten is not seen. Give at least {round(FEW / SHARES['judge'])} samples in one file"
    )


def make_samples(task: Task, seed: int) -> SampleSplits:
    """Make splits of synthetic samples of the task: enough to compare answers on, not to choose by."""
    parts = split(make_dataset(task.examples(MADE_UP, seed), task, name="made-up samples"), SHARES, seed)
    probe = parts["choose"].take(PROBE, seed)
    return SampleSplits(parts["calibrate"], parts["calibrate"], parts["choose"], probe, parts["judge"], fingerprints={})
