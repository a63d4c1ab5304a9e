"""What the techniques of a run cost and save on its device, predicted before the run starts."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from laconic.config import NamedSettings
from laconic.errors import RecipeError
from laconic.progress import Steps
from train.planner.device_rates import measure_rates
from train.planner.memory_prediction import MemoryPrediction
from train.planner.meta_model import MetaModel
from train.planner.prediction import predict
from train.precision import LEAST_PARAMETERS
from train.settings import Training

SLOWER = 1.1
"""Least factor of a step's time that is reported: predicted ratios are right within 25 %, most of them within 10 %."""
NOTHING = 0.98
"""A technique that leaves more than this share of the memory saves nothing worth its time."""
UNSIMULATED = ("compile", "allocator")
"""Techniques that the simulation leaves out."""


@dataclass(frozen=True)
class TechniqueCost:
    """A technique, or an optimizer, against the settings without it. time, memory: of a step, as factors of theirs."""

    name: str
    time: float
    memory: float

    @property
    def is_wasted(self) -> bool:
        """Whether it takes time and saves no memory."""
        return self.time >= SLOWER and self.memory > NOTHING


def report_costs(
    training: Training, named: Collection[str], model: MetaModel, length: int, device: torch.device, steps: Steps
) -> None:
    """Report the techniques that make a step slower, and warn of those that save no memory for it.

    named: the techniques that the user chose; others, and those of small models, whose steps take no time worth a
    prediction, are left out.
    """
    count = sum(parameter.numel() for parameter in model.module.parameters())
    others = list(leave_out_each(training, named))
    if count < LEAST_PARAMETERS or not others:
        return
    with steps.step("predict what the techniques cost"):
        costs = predict_costs(training, others, model, length, device)
    slower = [cost for cost in costs if cost.time >= SLOWER]
    for cost in slower:
        if cost.is_wasted:
            steps.warn(
                f"{cost.name}: a step is predicted to take {cost.time:.1f} times as long with it, and to save no "
                f"memory here, since the peak is elsewhere. Leave it out"
            )
        else:
            steps.report(cost.name, f"{cost.time:.1f} times the time of a step, {cost.memory:.2f} of its memory")


def leave_out_each(training: Training, chosen: Collection[str]) -> Iterator[tuple[str, Training]]:
    """Yield the settings without each of the chosen techniques, and with plain AdamW in place of another optimizer;
    settings that are not complete without a technique are left out."""
    for named in training.techniques:
        others = tuple(other for other in training.techniques if other is not named)
        changed = training.with_techniques(others)
        if named.name in chosen and named.name not in UNSIMULATED and is_complete(changed):
            yield named.name, changed
    if training.optimizer.name != "adamw":
        yield training.optimizer.name, training.model_copy(update={"optimizer": NamedSettings(name="adamw")})


def is_complete(training: Training) -> bool:
    """Return whether no technique of the settings lacks one that it requires."""
    try:
        training.components()
    except RecipeError:
        return False
    return True


def predict_costs(
    training: Training, others: list[tuple[str, Training]], model: MetaModel, length: int, device: torch.device
) -> list[TechniqueCost]:
    """Predict the cost of each technique that `others` leave out."""
    rates = measure_rates(device)
    shared = device.type == "cpu"

    def measure(prediction: MemoryPrediction) -> int:
        return prediction.total if shared else prediction.peak

    asked = predict(model, training, length, rates)
    costs = []
    for name, without in others:
        plain = predict(model, without, length, rates)
        costs.append(TechniqueCost(name, asked.seconds / plain.seconds, measure(asked) / max(measure(plain), 1)))
    return costs
