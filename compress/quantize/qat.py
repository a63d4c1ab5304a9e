"""Quantization-aware training (QAT): distill the original into a model with fake-quantized layers.

The result is a float model that is robust to rounding, and learned activation ranges: `quantize.static` uses these in
place of calibrated ones, so that every target gets them.
"""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from compress.distill.distill_stage import DistillStage
from compress.distill.distillation_loss import DistillationLoss
from compress.distill.distillation_objective import DistillationObjective
from compress.distill.heal import Heal
from compress.quantize.calibration import draw_calibration_samples, single_sample_batches
from compress.quantize.fake_quantize import LearnedRange, attach_fake_quantization, find_operation
from compress.quantize.ranges import RANGE_METHODS, RANGES
from compress.quantize.tensor_statistics import Histogram
from compress.statistics.layer_inputs import observe_inputs
from laconic.config import NamedSettings
from laconic.errors import RecipeError, UsageError, did_you_mean
from laconic.models.checkpoint import Checkpoint
from laconic.models.signature import call
from laconic.recipes.stage import Property, TorchContext
from laconic.tasks.task import Task
from train.step.objective import to_tensors
from train.step.train_state import StepCallback, TrainState
from train.step.trained_modules import TrainedModules


class Qat(DistillStage):
    """Train on the samples for learning, without labels, each layer's input and weight on the grids of INT8, and learn
    the inputs' ranges. `quantize.static` behind it takes those.

    A `quantize.static` after it uses the learned ranges. method: calibration method for the initial ranges. samples:
    number of calibration samples for these. keep: layers, by path or pattern, that stay in float; give
    `quantize.static` the same.
    """

    name: ClassVar[str] = "quantize.qat"
    makes: ClassVar[frozenset[Property]] = frozenset({"ranges"})
    trains = True

    batch_size: int = Field(default=16, ge=1)
    optimizer: NamedSettings = NamedSettings(name="adamw", config={"lr": 5e-5, "weight_decay": 0.0})
    method: Literal["minmax", "percentile", "entropy", "mse"] = "minmax"
    samples: int = Field(default=64, ge=1)
    keep: tuple[str, ...] = ()

    def losses(self, task: Task, layers: int) -> list[DistillationLoss]:
        return Heal().losses(task, layers)

    def objective(
        self, student: Checkpoint, context: TorchContext, device: torch.device
    ) -> "QuantizationAwareDistillation":
        base = super().objective(student, context, device)
        learned: dict[str, LearnedRange] = {}
        paths = find_quantizable(student.module, self.keep)
        for readers, histogram in observe_histograms(student.module, paths, self.samples, context):
            learned |= dict.fromkeys(readers, LearnedRange(RANGE_METHODS[self.method](histogram)))
        return QuantizationAwareDistillation(base, learned)

    def apply(self, checkpoint: Checkpoint, context: TorchContext) -> Checkpoint:
        learned: dict[str, LearnedRange] = {}

        def note(state: TrainState) -> StepCallback:
            assert isinstance(state.objective, QuantizationAwareDistillation)
            learned.update(state.objective.learned)
            return lambda done: None

        trained = self.train(checkpoint, context, (note,))
        ranges = {path: [quantizer.limits.low, quantizer.limits.high] for path, quantizer in learned.items()}
        record = self.make_record(self.name, checkpoint, context, {"last loss": trained.last_loss}, {RANGES: ranges})
        return checkpoint.after(record, trained.module)


class QuantizationAwareDistillation(DistillationObjective):
    """A distillation whose student computes on the grids of INT8. learned: the range of each layer's input, by path;
    layers that read the same tensor share one."""

    def __init__(self, base: DistillationObjective, learned: Mapping[str, LearnedRange]) -> None:
        super().__init__(
            base.task,
            base.teacher,
            base.losses,
            task_objective=base.task_objective,
            task_weight=base.task_weight,
        )
        self.learned = learned

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"learned": {}}

    def attach(self, modules: TrainedModules) -> None:
        super().attach(modules)
        for part in modules.model.modules():
            if getattr(part, "running_mean", None) is not None:
                part.eval()  # folded into its convolution later: other statistics would lead to other scales
        layers = dict(modules.model.named_modules())
        for path, learned in self.learned.items():
            operation = find_operation(layers[path]) if path in layers else None
            if operation is None:
                raise RecipeError(
                    f"quantize.qat trains {path} as it is, and a technique has put something else in its place. Remove "
                    f"lora, qlora and layerwise from its techniques"
                )
            modules.on_restore(attach_fake_quantization(layers[path], operation, learned))
        quantizers = nn.ModuleList(dict.fromkeys(self.learned.values())).to(modules.device)
        modules.add(RANGES, quantizers)


def find_quantizable(module: nn.Module, keep: Sequence[str]) -> list[str]:
    """Return the paths of the layers to fake-quantize.

    Raises UsageError where there are none, RecipeError for a pattern that matches none.
    """
    paths = [path for path, layer in module.named_modules() if find_operation(layer) is not None]
    for pattern in keep:
        if not any(fnmatch(path, pattern) for path in paths):
            raise RecipeError(f"keep: no layer is named {pattern!r}. {did_you_mean(pattern, paths)}")
    paths = [path for path in paths if not any(fnmatch(path, pattern) for pattern in keep)]
    if not paths:
        raise UsageError("quantize.qat found no linear layer and no convolution to train. Remove the stage")
    return paths


def observe_histograms(
    module: nn.Module, paths: Sequence[str], count: int, context: TorchContext
) -> Iterator[tuple[list[str], Histogram]]:
    """Yield histograms of the inputs of the layers at these paths, over `count` samples.

    Yields the paths of the layers that read the same tensor, and its histogram.
    """
    leader: dict[str, str] = {}
    first: dict[tuple[int, torch.Size], str] = {}
    alive: list[Tensor] = []
    histograms: dict[str, Histogram] = {}

    def record(path: str, layer: nn.Module, values: Tensor) -> None:
        alive.append(values)  # so that its memory is not another tensor's
        leader.setdefault(path, first.setdefault((values.data_ptr(), values.shape), path))
        if leader[path] == path:
            histograms.setdefault(path, Histogram()).add(values.cpu().numpy())

    with torch.inference_mode(), observe_inputs(module, paths, record):
        for batch in single_sample_batches(draw_calibration_samples(context, count), context.task):
            call(module, to_tensors(batch))
            alive.clear()
            first.clear()
    for path, histogram in histograms.items():
        yield [reader for reader, chief in leader.items() if chief == path], histogram
