"""The evaluations of a run of fine-tuning: before, during and after training; the best weights, and early stopping."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from laconic.data.dataset import Dataset
from laconic.errors import RecipeError, did_you_mean
from laconic.hardware import return_freed_memory
from laconic.progress import Steps
from train.callbacks.callback import RunLog
from train.callbacks.journal import format_line, read_lines
from train.finetune.evaluate import ROWS, evaluate
from train.finetune.metric import Metric
from train.parallel.pipeline_schedules import explain_recomputation
from train.reference_rows import complete_rows
from train.settings import TrainingRecipe
from train.snapshots.snapshot import Snapshots
from train.step.train_state import TrainState

PART_ROWS = 512
"""Rows of the validation set that the model is evaluated on during training; before and after on all of them."""
LOG, ANSWERS, BEST = "evaluations.jsonl", "answers.jsonl", "best"
FALLING = frozenset({"loss", "perplexity"})
"""Figures of which the lowest is the best; of all others the highest is, unless a metric says otherwise."""


class Evaluator:
    """Evaluates the model on the validation set: on all of it before and after training, on a part during it.

    The model is evaluated as it is trained, on the device and with its techniques, so that evaluation takes no more
    memory than training does; where the weights are averaged, with the averages. All figures are logged in the folder
    of the run, and no step is evaluated twice, also when the run is resumed. Where the recipe names a figure in
    `best_by`, the weights with the best one are kept on disk, and are those of the result.

    before, after: the figures of all of the validation set. best: the step with the best figure during training, None
    without any.
    """

    def __init__(
        self,
        validation: Dataset,
        recipe: TrainingRecipe,
        folder: Path,
        steps: Steps,
        *,
        is_first: bool = True,
        logs: Sequence[RunLog] = (),
    ) -> None:
        """folder: of the run. is_first: whether this is the rank that writes the log. logs: told of each evaluation."""
        self._logs = logs
        self._all = validation
        self._part = validation.rows(range(min(PART_ROWS, len(validation.keys))), validation.name)
        self._by, self._patience, self._rows = recipe.best_by, recipe.patience, min(ROWS, recipe.batch_size)
        self._metrics: dict[str, Metric] = {named.name: named.configure("metric", Metric) for named in recipe.metrics}
        self._falling = FALLING | {name for name, metric in self._metrics.items() if not metric.higher_is_better}
        self._asked = range(min(recipe.generate, len(validation.keys)))
        self._folder, self._steps, self._is_first = folder, steps, is_first
        self._recomputation = explain_recomputation(recipe.mesh, [named.name for named in recipe.techniques])
        self._figures = {int(line.pop("step")): line for line in read_lines(folder / LOG)}
        self.after: dict[str, float] = {}
        # The log is written before the weights: what was killed in between is evaluated again.
        kept = read_kept_step(folder / BEST) if self._by else None
        while self._by and self.best is not None and self.best != kept:
            del self._figures[self.best]

    @property
    def before(self) -> Mapping[str, float]:
        return self._figures.get(0, {})

    @property
    def best(self) -> int | None:
        return self._find_best(max(self._figures, default=0))

    def _find_best(self, done: int) -> int | None:
        """Find the step with the best figure up to a number of steps, the first of several; None without any."""
        name = self._by
        if name is None:
            return None
        sign = -1 if name in self._falling else 1
        steps = [step for step in sorted(self._figures) if 0 < step <= done]
        return max(steps, key=lambda step: sign * self._figures[step][name], default=None)

    def __call__(self, state: TrainState, done: int) -> bool:
        """Evaluate after a number of steps. True where the best figure has not improved for `patience` evaluations.

        Raises RecipeError where `best_by` is no figure of this model.
        """
        if done == 0:
            self._all = complete_rows(state, self._all, self._folder, self._rows)
            self._part = self._all.rows(range(len(self._part.keys)), self._all.name)
            if description := state.strategy.describe():
                self._steps.report("pipeline", "; ".join(filter(None, (description, self._recomputation))))
            with self._steps.step("evaluate before training") as step:
                if done not in self._figures:
                    self._record(done, self._evaluate(state, self._all))
                    self._generate(state, done)
                step.note = format_figures(self.before)
            if self._by is not None and self._by not in self.before:
                raise RecipeError(f"best_by: {self._by!r} is not evaluated. {did_you_mean(self._by, self.before)}")
            return False
        if done not in self._figures:
            figures = self._evaluate(state, self._part)
            self._record(done, figures)
            if self.best == done:
                with Snapshots(self._folder / BEST, keep=1) as kept, state.averaged_weights():
                    kept.save(done, {"model": state.weights()}, wait=True)
            self._steps.report(f"after step {done}", format_figures(figures))
            self._generate(state, done)
        best = self._find_best(done)
        return (
            self._patience is not None
            and best is not None
            and sum(best < step <= done for step in self._figures) >= self._patience
        )

    def conclude(self, state: TrainState, done: int) -> None:
        """Evaluate on all of the validation set after the last step; before that, load the best weights."""
        if self._by is not None:
            self(state, done)
            if self.best != done:
                with Snapshots(self._folder / BEST, keep=1) as kept:
                    kept.load({"model": state.weights()})
                state.modules.refresh_copies()
            self._steps.report("best weights", f"after step {self.best} of {done}, by {self._by}")
        with self._steps.step("evaluate after training") as step:
            self.after = self._evaluate(state, self._all)
            step.note = format_figures(self.after)
        if done not in self._figures:
            self._tell(done, self.after)
            self._generate(state, done)

    def count_rows_to_come(self, left: int, every: int) -> int:
        """Count the rows that are evaluated in the last `left` steps of a run, by an evaluation each `every` steps."""
        return left // every * len(self._part.keys) + len(self._all.keys)

    def _tell(self, done: int, figures: Mapping[str, float]) -> None:
        for log in self._logs:
            log.evaluated(done, figures)

    def _evaluate(self, state: TrainState, dataset: Dataset) -> dict[str, float]:
        rows = min(self._rows, state.micro_batch_rows or ROWS)
        with state.averaged_weights(), state.strategy.gather_weights():
            figures = evaluate(
                state.module,
                state.objective,
                dataset,
                state.device,
                rows=rows,
                forward_context=state.forward_context,
                strategy=state.strategy,
                metrics=self._metrics,
                before_batch=state.stop_if_asked,
            )
        return_freed_memory()
        return figures

    def _generate(self, state: TrainState, done: int) -> None:
        """Log answers that the model generates, and report the first."""
        if not self._asked:
            return
        training = state.module.training
        state.module.eval()
        try:
            with (
                state.averaged_weights(),
                state.strategy.gather_weights(),
                torch.no_grad(),
                state.forward_context(),
            ):
                samples = [self._all.samples[row] for row in self._asked]
                module = state.strategy.share_module(state.module)
                answers = state.objective.answer(module, samples, state.device)
        finally:
            state.module.train(training)
        self._steps.report("generated", " ".join(answers[0]["answer"].split()) or "nothing")
        if self._is_first:
            path = self._folder / ANSWERS
            lines = [line for line in read_lines(path) if line["step"] < done]
            lines += [{"step": done, **answer} for answer in answers]
            path.write_text("".join(map(format_line, lines)), encoding="utf-8")

    def _record(self, done: int, figures: dict[str, float]) -> None:
        self._figures[done] = figures
        self._tell(done, figures)
        if self._is_first:
            partial = self._folder / f".{LOG}.new"
            lines = [{"step": step, **self._figures[step]} for step in sorted(self._figures)]
            partial.write_text("".join(map(format_line, lines)), encoding="utf-8")
            partial.replace(self._folder / LOG)


def read_kept_step(folder: Path) -> int | None:
    """Read the step whose weights are kept in a folder of snapshots; None without any."""
    if not folder.is_dir():
        return None
    with Snapshots(folder, keep=1) as kept:
        return kept.latest()


def format_figures(figures: Mapping[str, float]) -> str:
    """Format figures in a line: "loss 0.1234, accuracy 0.9000"."""
    return ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
