"""What the planner predicts beside what is measured: the time of a step of training, as a share of plain training's.

    python benchmarks/steps.py [--only MiniLM] [--rounds 5] [--cache .cache/bench]

For each model, all combinations take a step in turns, so that what else the machine does hits them alike. Each step is
timed by the processor time of one thread, and so is the device by which the planner predicts. A ratio is the median
over the rounds of a step's time by that of plain training in the same round. It takes some five minutes.
"""

import math
import statistics
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import training as shared
from results import Results, make_parser
from training import ADAMW, Model, spoken

from train.device_clock import make_clock
from train.planner.device_rates import DeviceRates, measure_rates
from train.planner.prediction import predict
from train.settings import Training
from train.step.objective import Batch
from train.step.train_state import TrainState
from train.step.train_step import train_step
from train.step_assembly import make_step_parts

CPU = torch.device("cpu")
GOAL = 0.25
APART = 0.1
"""Two measured ratios whose logarithms differ by less have no order."""

CHOICES: tuple[tuple[tuple[Any, ...], Any], ...] = (
    ((), ADAMW),
    (("sdpa",), ADAMW),
    (("sdpa", "gradient-checkpointing"), ADAMW),
    (("sdpa", {"gradient-accumulation": {"rows": 2}}), ADAMW),
    (("sdpa", {"layerwise": {"rows": 2}}), ADAMW),
    (("bf16",), ADAMW),
    (("sdpa", "lora"), ADAMW),
    ((), "adamw-8bit"),
)
"""Techniques and the optimizer; the first is plain training."""


def make_step(model: Model, training: Training) -> tuple[TrainState, Batch]:
    """A model in training, and a batch."""
    torch.manual_seed(0)
    objective = model.subject.objective()
    state = make_step_parts(model.real(), objective, training.components(), CPU).assemble()
    return state, objective.make_example(model.batch, model.length)


def measure(model: Model, trainings: list[Training], rounds: int) -> list[list[float]]:
    """Seconds of a step, by combination and round; the first step of each warms up."""
    clock: Callable[[], float] = make_clock(CPU)
    made = [make_step(model, training) for training in trainings]
    found: list[list[float]] = [[] for _ in trainings]
    for turn in range(rounds + 1):
        for (state, batch), training, times in zip(made, trainings, found, strict=True):
            begin = clock()
            train_step(state, batch, max_grad_norm=training.max_grad_norm)
            if turn:
                times.append(clock() - begin)
    return found


def compare(model: Model, rates: DeviceRates, rounds: int, results: Results) -> None:
    """Print the ratios of a model, their errors, and how many pairs are in the right order."""
    trainings = [shared.settings(choice, optimizer, model.batch) for choice, optimizer in CHOICES]
    predicted = [predict(model.subject, training, model.length, rates).seconds for training in trainings]
    times = measure(model, trainings, rounds)
    guesses = [each / predicted[0] for each in predicted]
    ratios = [statistics.median(a / b for a, b in zip(each, times[0], strict=True)) for each in times]
    plain = statistics.median(times[0])
    print(
        f"\n{model.name}, {model.subject.parameters / 1e6:.1f} M parameters, {model.batch} x {model.length} tokens; "
        f"plain training: {plain:.2f} s a step, {predicted[0]:.2f} s predicted\n"
    )
    results.begin(model.name, ["combination", "predicted", "measured", "error"])
    errors = [guess / ratio - 1 for guess, ratio in zip(guesses, ratios, strict=True)]
    for training, guess, ratio, error in zip(trainings, guesses, ratios, errors, strict=True):
        results.add(model.name, [spoken(training), f"{guess:.2f} x", f"{ratio:.2f} x", f"{error:+z.0%}"])
    both = list(zip(ratios, guesses, strict=True))
    pairs = [(a, b) for a, b in combinations(both, 2) if abs(math.log(a[0] / b[0])) > APART]
    right = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)
    within = sum(abs(error) <= GOAL for error in errors[1:])
    print(
        f"\n{model.name}: {within} of {len(errors) - 1} ratios within {GOAL:.0%}; of the {len(pairs)} pairs that are "
        f"more than {APART:.0%} apart, {right} in the right order.",
        flush=True,
    )


def models(folder: Path) -> tuple[Model, ...]:
    """The architectures."""
    return (
        shared.minilm(folder, batch=8, length=64),
        shared.gpt(folder, width=256, layers=4, heads=8, words=8192, batch=8, length=128),
    )


def main() -> None:
    """Predict, measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", help="one model, by its name")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each combination")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where configs go")
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    torch.set_num_threads(1)
    rates = measure_rates(CPU)
    print(f"{rates.share:.0%} of a thread was left.")
    for model in models(arguments.cache):
        if arguments.only in (None, model.name):
            compare(model, rates, arguments.rounds, results)


if __name__ == "__main__":
    main()
