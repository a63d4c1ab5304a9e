"""Training for the GPU benchmark: what the planner predicts for a 1.1 B model, beside the bytes of the CUDA allocator.

In a dry run a tiny model on the CPU, whose bytes are those of its tensors: the allocator there counts nothing.
"""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import training as shared
from gpu_rows import Pace, first_line
from large import ACCUMULATE, BASELINE, CHUNK, ROWS, TOKENS
from training import Model, settings, spoken

from train.planner.device_rates import measure_rates
from train.planner.prediction import predict
from train.planner.simulate import STEPS, trace_memory
from train.settings import Training
from train.step.objective import Batch
from train.step.train_state import TrainState
from train.step.train_step import train_step
from train.step_assembly import make_step_parts

BEST: tuple[tuple[tuple[Any, ...], Any], ...] = (
    (("sdpa", "chunked-cross-entropy", "gradient-checkpointing", "optimizer-in-backward"), "adamw"),
    (("sdpa", "chunked-cross-entropy", "bf16", "gradient-checkpointing", ACCUMULATE), "adamw-8bit"),
    (
        ("sdpa", "chunked-cross-entropy", "pure-bf16", "gradient-checkpointing", "optimizer-in-backward"),
        {"adafactor": {"stochastic_rounding": True}},
    ),
    (("sdpa", {"layerwise": {"rows": 1, "snapshots": 4}}, CHUNK, "optimizer-in-backward"), "adamw"),
    (("sdpa", "chunked-cross-entropy", "qlora", "bf16", "gradient-checkpointing", ACCUMULATE), "adamw"),
    (("sdpa",), "adamw"),
    ((), BASELINE),
)
"""Combinations of docs/training.md: of each kind the one with the least memory, and plain training to compare with."""
FREE = 0.05
"""Share of the device's memory that a combination must leave free, to be run."""


@dataclass(frozen=True)
class TrainingRow:
    """A combination. predicted, measured: the most bytes on the device in a step; seconds: of one step, wall-clock.
    None: not measured, and the note says why."""

    model: str
    combination: str
    predicted: int
    measured: int | None
    predicted_seconds: float
    measured_seconds: float | None
    note: str


def train_combinations(device: torch.device, folder: Path, pace: Pace) -> Iterator[TrainingRow]:
    """Predict and measure the combinations, as far as the time suffices. folder: for the model's config."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        model = shared.gpt(folder, width=2048, layers=20, heads=16, words=50257, batch=ROWS, length=TOKENS)
    else:
        model = shared.gpt(folder, width=32, layers=2, heads=2, words=128, batch=4, length=16)
    rates = measure_rates(device)
    name = f"{model.name}, {model.subject.parameters / 1e6:,.3g} M"
    limit = (1 - FREE) * torch.cuda.mem_get_info(device)[0] if on_gpu else float("inf")
    longest = 0.0
    for choice, optimizer in BEST if on_gpu else BEST[:3]:
        start = time.monotonic()
        training = settings(choice, optimizer, model.batch)
        found = predict(model.subject, training, model.length, rates)
        measured, seconds, note = None, None, ""
        if found.peak > limit:
            note = f"does not fit into the {limit / 2**30:.1f} GiB that are free"
        elif start + longest > pace.end:
            note = "no time left (--minutes)"
        else:
            try:
                measured, seconds = run_steps(model, training, device)
            except Exception as error:  # noqa: BLE001 - the row says so, and the others are still measured
                note = f"{type(error).__name__}: {first_line(error)}"
            longest = max(longest, time.monotonic() - start)
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        yield TrainingRow(name, spoken(training), found.peak, measured, found.seconds, seconds, note)


def run_steps(model: Model, training: Training, device: torch.device) -> tuple[int, float]:
    """Run a few steps on real tensors. Returns the peak bytes on the device, and the seconds of the last step."""
    clip = training.max_grad_norm
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        state, batch = prepare_step(model, training, device)
        torch.cuda.reset_peak_memory_stats(device)
        for _ in range(STEPS):
            train_step(state, batch, max_grad_norm=clip)
        seconds = measure_seconds(lambda: train_step(state, batch, max_grad_norm=clip))
        return torch.cuda.max_memory_allocated(device) - before, seconds
    prepare = partial(prepare_step, model, training, device)
    peak = trace_memory(prepare, device, clip=clip).peak()
    state, batch = prepare()
    return peak, measure_seconds(lambda: train_step(state, batch, max_grad_norm=clip))


def prepare_step(model: Model, training: Training, device: torch.device) -> tuple[TrainState, Batch]:
    """The state and the batch of a step, on the device."""
    torch.manual_seed(0)
    objective = model.subject.objective()
    state = make_step_parts(model.real(), objective, training.components(), device).assemble()
    batch = objective.make_example(model.batch, model.length)
    return state, {name: tensor.to(device) for name, tensor in batch.items()}


def measure_seconds(run: Callable[[], object]) -> float:
    """Wall-clock seconds of a call, with the device's work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
