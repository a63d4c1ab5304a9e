"""What the planner predicts beside what is measured: the most bytes that a step of training holds at once.

    python benchmarks/memory.py [--only GPT-2] [--fast] [--without-onednn] [--cache .cache/bench]

Each combination is predicted from the model's structure alone, and then runs two steps on real tensors, counted twice:
by the watch, which sees every tensor, and by torch's allocator (allocator.py), which sees whatever kernels take beside
them and knows nothing of the watch. The device and the host are compared with the allocator apart. Beside it what
Accelerate (`accelerate estimate-memory`) and DeepSpeed (`estimate_zero2_model_states_mem_needs`, and zero3's where
weights are on the host) say, which know of weights, gradients and the optimizer; DeepSpeed's where it is installed.
"""

import contextlib
import gc
import importlib
import io
import statistics
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import training as shared
from allocator import AllocatedPeaks, measure_allocated_peaks
from results import Results, make_parser
from training import Model, spoken

from laconic.errors import MissingPackage, RecipeError
from train.planner.device_rates import DeviceRates, measure_rates
from train.planner.prediction import predict
from train.planner.simulate import STEPS, trace_memory
from train.settings import Training
from train.step.objective import Batch
from train.step.train_state import TrainState
from train.step_assembly import make_step_parts

CPU = torch.device("cpu")
MIB = 2**20
PEERS = ("Accelerate", "DeepSpeed")
MEASURES = ("tracked tensors", "the allocator's device", "the allocator's host")
HEAD = (
    "combination", "predicted", "watched", "error", "allocator", "error", "host, predicted", "host, allocator", "error",
    *PEERS,
)  # fmt: skip
SUMMARY = ("model", "combinations", *(f"median and worst error against {other}" for other in MEASURES), *PEERS)
ON_HOST = ("model", "combination", "device, predicted", "allocator", "host, predicted", "allocator")
"""Of the combinations that keep at least a tenth of their bytes on the host; MiB."""


@dataclass(frozen=True)
class Line:
    """Bytes of a combination. predicted, host: on the device and on the host, by the planner as it is used. whole: on
    the device, with every layer simulated. watched: of real tensors on the device. allocated: by the allocator.
    guesses: by PEERS, None where one is not installed."""

    name: str
    predicted: int
    host: int
    whole: int
    watched: int
    allocated: AllocatedPeaks
    guesses: tuple[int | None, ...]

    @property
    def errors(self) -> tuple[float, float, float]:
        """Of the device against the watch and against the allocator, and of the host against the allocator, as shares.

        The host's is of both sides' bytes where less than a tenth of them is the host's.
        """
        host = max(self.allocated.host, self.allocated.both // 10)
        return (
            self.predicted / self.watched - 1,
            self.predicted / self.allocated.device - 1,
            (self.host - self.allocated.host) / host,
        )


def measured(model: Model, training: Training, rates: DeviceRates) -> Line:
    """Predict, and run."""
    predicted = predict(model.subject, training, model.length, rates)
    whole = predicted if predicted.timeline else predict(model.subject, training, model.length, rates, whole=True)

    def prepare() -> tuple[TrainState, Batch]:
        torch.manual_seed(0)
        objective = model.subject.objective()
        state = make_step_parts(model.real(), objective, training.components(), CPU).assemble()
        return state, padded(objective.make_example(model.batch, model.length))

    watched = trace_memory(prepare, CPU, clip=training.max_grad_norm).peak()
    gc.collect()
    allocated = measure_allocated_peaks(prepare, STEPS, training.max_grad_norm)
    guesses = (Peers(model).accelerate(training), Peers(model).deepspeed(training))
    return Line(spoken(training), predicted.peak, predicted.host, whole.peak, watched, allocated, guesses)


def padded(batch: Batch) -> Batch:
    """The batch with one token less, where it may have less: without any padding no mask would be made of it."""
    if "attention_mask" in batch:
        batch["attention_mask"][0, -1] = 0
    return batch


@dataclass(frozen=True)
class Peers:
    """What the formulas of others say of a model, in bytes. None where the peer is not installed."""

    model: Model

    def accelerate(self, training: Training) -> int | None:
        """The largest of its four figures, which its command prints as "Training using Adam"."""
        with contextlib.suppress(ImportError):
            estimate = importlib.import_module("accelerate.commands.estimate")
            size, _ = estimate.calculate_maximum_sizes(self.model.subject.module)
            low = {"bf16", "fp16", "pure-bf16"} & {named.name for named in training.techniques}
            return int(max(estimate.estimate_training_usage(size, "bfloat16" if low else "float32").values()))
        return None

    def deepspeed(self, training: Training) -> int | None:
        """On one device; with the weights on the host where the combination has them there."""
        with contextlib.suppress(ImportError), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            total = self.model.subject.parameters
            if any(named.name == "host-weights" for named in training.techniques):
                stage = importlib.import_module("deepspeed.runtime.zero.stage3")
                largest = max(
                    sum(parameter.numel() for parameter in part.parameters(recurse=False))
                    for part in self.model.subject.module.modules()
                )
                return int(stage.estimate_zero3_model_states_mem_needs(total, largest, 1, 1, True, True, True)[1])
            stage = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2")
            return int(stage.estimate_zero2_model_states_mem_needs(total, 1, 1, False, 1.5)[1])
        return None


def models(folder: Path) -> tuple[Model, ...]:
    """The architectures."""
    return (
        shared.gpt(folder, width=256, layers=8, heads=8, words=16384, batch=6, length=64),
        shared.minilm(folder, batch=6, length=48),
        shared.vit(folder, batch=8),
        shared.cnn(batch=16),
    )


def compare(model: Model, rates: DeviceRates, results: Results, *, fast: bool) -> list[Line]:
    """Print the lines of a model. Returns them."""
    lines = []
    print(
        f"\n{model.name}, {model.subject.parameters / 1e6:.1f} M parameters, batch {model.batch}"
        f"{f', {model.length} tokens' if model.length > 1 else ''}; MiB\n"
    )
    results.begin(model.name, HEAD)
    for number, training in enumerate(model.combinations()):
        if fast and number % 3:
            continue
        try:
            line = measured(model, training, rates)
        except (RecipeError, MissingPackage) as error:
            refusal = f"does not apply: {str(error).partition('.')[0]}"
            results.add(model.name, [spoken(training), refusal, *[""] * (len(HEAD) - 2)])
            continue
        lines.append(line)
        device, host, _ = line.allocated
        sizes = [f"{size / MIB:.1f}" for size in (line.predicted, line.watched, device, line.host, host)]
        errors = [f"{error:+.2%}" for error in line.errors]
        others = [
            "" if guess is None else f"{guess / MIB:.0f} ({guess / line.watched - 1:+z.0%})" for guess in line.guesses
        ]
        cells = [line.name, *sizes[:2], errors[0], sizes[2], errors[1], *sizes[3:], errors[2], *others]
        results.add(model.name, cells)
    cut = max(abs(line.predicted / line.whole - 1) for line in lines)
    print(f"\n{model.name}, a few layers instead of all: at most {cut:.4%} off.", flush=True)
    return lines


def summarize(model: Model, lines: list[Line]) -> list[str]:
    """The cells of SUMMARY: the median and the worst error, and between which errors each peer is."""
    cells = [f"{model.name}, {model.subject.parameters / 1e6:.1f} M", str(len(lines))]
    for index in range(len(MEASURES)):
        errors = {line.name: line.errors[index] for line in lines}
        worst = max(errors, key=lambda name: abs(errors[name]))
        median = statistics.median(abs(error) for error in errors.values())
        cells.append(f"{median:.3%}, {errors[worst]:+z.2%}" + (f" (`{worst}`)" if round(errors[worst], 4) else ""))
    for guesses in zip(*(line.guesses for line in lines), strict=True):
        wrong = [guess / line.watched - 1 for guess, line in zip(guesses, lines, strict=True) if guess is not None]
        cells.append(f"{min(wrong):+.0%} to {max(wrong):+.0%}" if wrong else "not installed")
    return cells


def list_hosted(model: Model, lines: list[Line]) -> list[list[str]]:
    """The cells of ON_HOST."""
    hosted = [line for line in lines if line.host >= (line.predicted + line.host) / 10]
    sizes = [(line.predicted, line.allocated.device, line.host, line.allocated.host) for line in hosted]
    names = [[model.name, f"`{line.name}`"] for line in hosted]
    return [[*name, *(f"{size / MIB:.1f}" for size in each)] for name, each in zip(names, sizes, strict=True)]


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", help="one model, by its name")
    parser.add_argument("--fast", action="store_true", help="every third combination")
    parser.add_argument("--without-onednn", action="store_true", help="let PyTorch's own kernels compute convolutions")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where configs go")
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    rates, begin = measure_rates(CPU), time.perf_counter()
    summary: list[list[str]] = []
    hosted: list[list[str]] = []
    with torch.backends.mkldnn.flags(enabled=not arguments.without_onednn):
        for model in models(arguments.cache):
            if arguments.only in (None, model.name):
                lines = compare(model, rates, results, fast=arguments.fast)
                summary.append(summarize(model, lines))
                hosted += list_hosted(model, lines)
    results.table("summary", SUMMARY, summary)
    results.table("on the host", ON_HOST, hosted)
    print(f"\n{time.perf_counter() - begin:.0f} s.")


if __name__ == "__main__":
    main()
