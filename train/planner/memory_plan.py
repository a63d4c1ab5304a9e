"""The plan of a training: the predicted memory and time of each combination of techniques, the fastest that fits, and
the largest batch that fits with it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from laconic.errors import RecipeError
from laconic.progress import Steps
from laconic.units import format_count
from train.planner.combinations import Combination, list_combinations
from train.planner.device_rates import DeviceRates, measure_optimizer, measure_rates
from train.planner.memory_prediction import HEADROOM, SAME_TIME, MemoryPrediction
from train.planner.meta_model import MetaModel
from train.planner.parallel_map import map_parallel
from train.planner.prediction import predict_per_device
from train.settings import Training

ATTEMPTS = 12
"""Most predictions in the search for the largest batch."""
LARGEST_INPUT = 2**26
"""Bytes of the largest batch that is simulated, since its inputs are real tensors; memory is extrapolated beyond."""


@dataclass(frozen=True)
class PredictionJob:
    """What the predictions of a plan have in common, as of `predict_per_device`. plain: settings without techniques."""

    model: MetaModel
    length: int
    rates: DeviceRates
    devices: int
    plain: Training

    def predict(self, training: Training) -> MemoryPrediction | None:
        """Predict a step with these settings, without its timeline; None where only the step shows that the model does
        not support a proposed technique, as layerwise training of a decoder that reads an encoder."""
        try:
            prediction = predict_per_device(self.model, training, self.length, self.rates, self.devices)
        except RecipeError:
            if training == self.plain:
                raise
            return None
        return replace(prediction, timeline=None)


@dataclass(frozen=True)
class PlanRow:
    """A combination and its prediction. shared: whether device and host are the same memory, as on a CPU."""

    combination: Combination
    prediction: MemoryPrediction
    shared: bool = False

    @property
    def need(self) -> int:
        """Bytes that it needs of the planned memory."""
        return self.prediction.peak + (self.prediction.host if self.shared else 0)

    @property
    def caution(self) -> str | None:
        """What its optimizer was measured to lose; None where nothing."""
        return self.combination.training.components().optimizer.caution

    def fits(self, memory: int) -> bool:
        """Return whether it fits into `memory` bytes with HEADROOM to spare."""
        return self.need <= memory * (1 - HEADROOM)


@dataclass(frozen=True)
class MemoryPlan:
    """rows: the first is plain training. chosen: the fastest that fits; None where none does. largest: rows of the
    largest batch that fits with the chosen techniques; None where gradient accumulation makes any batch fit. length:
    tokens. memory: bytes of each device."""

    model: MetaModel
    length: int
    memory: int
    rates: DeviceRates
    rows: tuple[PlanRow, ...]
    chosen: PlanRow | None
    largest: int | None
    devices: int = 1

    def predict_whole(self, row: PlanRow) -> MemoryPrediction:
        """Predict a row with its timeline: every layer is simulated."""
        training = row.combination.training
        return predict_per_device(self.model, training, self.length, self.rates, self.devices, whole=True)

    @property
    def plain(self) -> PlanRow:
        """Training without any technique."""
        return self.rows[0]

    @property
    def has_device_times(self) -> bool:
        """Whether the times are those of the device whose memory is planned, as of `are_rates_of_device`."""
        return are_rates_of_device(self.plain, self.rates)

    def find_pareto_front(self) -> list[PlanRow]:
        """Find the rows that no other beats in both memory and time, fastest first: of those that train all weights,
        then of those that train adapters."""
        front: list[PlanRow] = []
        for whole in (True, False):
            rows = [row for row in self.rows if row.combination.whole is whole]
            least = None
            for row in sorted(rows, key=lambda row: (row.prediction.seconds, row.need)):
                if least is None or row.need < least:
                    front.append(row)
                    least = row.need
        return front


def plan_memory(
    model: MetaModel,
    training: Training,
    *,
    length: int,
    memory: int,
    device: torch.device,
    apart: bool | None = None,
    devices: int = 1,
    steps: Steps | None = None,
    rates: DeviceRates | None = None,
    workers: int = 1,
) -> MemoryPlan:
    """Predict every combination, and choose. Nothing is allocated, and no weight is read.

    memory: bytes of each device. device: whose speed counts. apart: whether the device's memory is separate from the
    host's; by default, whether the device is a GPU. devices: how many share a batch, as the settings' mesh says.
    rates: of the device; measured by default. workers: most processes that predict, as of `map_parallel`.

    Raises RecipeError where `length` is more than the model takes.
    """
    steps = steps or Steps()
    apart = device.type != "cpu" if apart is None else apart
    if model.longest is not None and length > model.longest:
        raise RecipeError(f"{model.name} takes at most {model.longest} tokens, and {length} are asked for")
    combinations = list_combinations(model, training, device, devices)
    with steps.step("measure the device's speed") as step:
        rates = rates or measure_rates(device)
        for combination in combinations:  # before processes that predict keep the processor busy
            measure_optimizer(combination.training.components().optimizer, rates)
        step.note = rates.name
    if rates.is_busy:
        steps.warn(rates.explain_busy())
    trainings = [combination.training for combination in combinations]
    with steps.step("simulate", len(combinations)) as step:
        predictions: dict[int, MemoryPrediction] = {}
        job = PredictionJob(model, length, rates, devices, trainings[0])
        for index, prediction in map_parallel(job.predict, trainings, workers=workers):
            if prediction is not None:
                predictions[index] = prediction
            step.advance()
        rows = [PlanRow(combinations[index], predictions[index], shared=not apart) for index in sorted(predictions)]
        step.note = f"{len(rows)} combinations of {format_count(model.parameters, billion='B')} parameters"
    chosen = choose_row(rows, memory, copy_timed=are_rates_of_device(rows[0], rates))
    largest = None
    if chosen:
        with steps.step("find the largest batch"):
            largest = find_largest_batch(model, chosen, length, memory, rates, devices)
    return MemoryPlan(model, length, memory, rates, tuple(rows), chosen, largest, devices)


def are_rates_of_device(row: PlanRow, rates: DeviceRates) -> bool:
    """Return whether the device whose memory is planned was timed: not where that is a GPU, and only a CPU is here."""
    return row.shared or rates.kind != "cpu"


def choose_row(rows: Sequence[PlanRow], memory: int, *, copy_timed: bool = True) -> PlanRow | None:
    """Choose the fastest that fits and trains all weights; where none does, the fastest that fits.

    rows: the first is plain training. copy_timed: whether copies between device and host were measured. Otherwise,
    combinations that need none are preferred.
    """
    fitting = [row for row in rows if row.fits(memory)]
    allowed = [row for row in fitting if row.combination.whole] or fitting
    if not allowed:
        return None
    if not copy_timed:
        allowed = [row for row in allowed if not row.prediction.host] or allowed
    best = min(row.prediction.seconds for row in allowed)
    near = [row for row in allowed if row.prediction.seconds <= SAME_TIME * best]
    clip = rows[0].combination.training.max_grad_norm
    return min(
        near, key=lambda row: (not row.combination.exact, row.combination.training.max_grad_norm != clip, row.need)
    )


def find_largest_batch(
    model: MetaModel, chosen: PlanRow, length: int, memory: int, rates: DeviceRates, devices: int = 1
) -> int | None:
    """Find the rows of the largest batch that fits with these techniques; None where gradient accumulation makes any
    batch fit.

    Memory is nearly linear in the rows, so the line through the last two guesses gives the next (regula falsi). No
    batch of more than LARGEST_INPUT bytes is simulated.
    """
    training = chosen.combination.training
    if training.components().micro_batch is not None:
        return None

    def predict_need(rows: int) -> int:
        prediction = predict_per_device(model, training.model_copy(update={"batch_size": rows}), length, rates, devices)
        return replace(chosen, prediction=prediction).need

    limit = memory * (1 - HEADROOM)
    row = sum(tensor.nbytes for tensor in model.objective().make_example(1, length).values())
    most = max(2 * training.batch_size, LARGEST_INPUT // row)
    good, bad = training.batch_size, 0
    known = {good: chosen.need}
    guess = 2 * good
    for _ in range(ATTEMPTS):
        known[guess] = predict_need(guess)
        good, bad = (max(good, guess), bad) if known[guess] <= limit else (good, guess)
        if bad == good + 1:
            break
        a, b = sorted(known)[-2:] if not bad else (good, bad)
        slope = (known[b] - known[a]) / (b - a)
        aim = int(a + (limit - known[a]) / slope) if slope > 0 else 2 * b
        guess = min(max(aim, good + 1), bad - 1) if bad else max(aim, good + 1)
        if guess > most:
            if most in known:
                return guess
            guess = most
    return good
