"""Quantization-aware training: the original teaches a model whose layers compute as they will in INT8.

What it leaves is a float model whose weights survive rounding, and the ranges that were learned: `quantize.static`
takes them in the place of calibrated ones, so that every target gets them.
"""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from compress.distill.distill_stage import Distil
from compress.distill.distillation import Distillation
from compress.distill.distillation_loss import Imitation
from compress.distill.heal import Heal
from compress.quantize.calibrate import drawn, singles
from compress.quantize.fake_quantize import LearnedRange, attach, multiplies
from compress.quantize.histogram import Histogram
from compress.quantize.learned_ranges import RANGES
from compress.quantize.ranges import METHODS
from compress.statistics.gram import watched
from laconic.config import NamedSettings
from laconic.errors import RecipeError, UsageError
from laconic.models.signature import call
from laconic.recipes.stage import Property, TorchContext
from laconic.registry import did_you_mean
from laconic.tasks.task import Task
from laconic.training.loop import Event
from laconic.training.step.objective import tensors
from laconic.training.step.parts import Groups, Kit

if TYPE_CHECKING:
    from laconic.models.checkpoint import Checkpoint


class Qat(Distil):
    """Train on the samples for learning, without labels, each layer's input and weight on the grids of INT8, and learn
    the inputs' ranges. `quantize.static` behind it takes those.

    method: how the range is found that learning starts from. samples: how many for that. keep: layers, by path or
    pattern, that stay in float; name them to `quantize.static`, too.
    """

    name: ClassVar[str] = "quantize.qat"
    makes: ClassVar[frozenset[Property]] = frozenset({"ranges"})
    trains = True

    batch: int = Field(default=16, ge=1)
    optimizer: NamedSettings = NamedSettings(name="adamw", config={"lr": 5e-5, "weight_decay": 0.0})
    method: Literal["minmax", "percentile", "entropy", "mse"] = "minmax"
    samples: int = Field(default=64, ge=1)
    keep: tuple[str, ...] = ()

    def imitations(self, task: Task, layers: int) -> list[Imitation]:
        return Heal().imitations(task, layers)

    def objective(self, student: "Checkpoint", context: TorchContext, device: torch.device) -> "OnGrid":
        base = super().objective(student, context, device)
        learned: dict[str, LearnedRange] = {}
        for readers, histogram in seen(student.module, quantized(student.module, self.keep), self.samples, context):
            learned |= dict.fromkeys(readers, LearnedRange(METHODS[self.method](histogram)))
        return OnGrid(base, learned)

    def apply(self, checkpoint: "Checkpoint", context: TorchContext) -> "Checkpoint":
        learned: dict[str, LearnedRange] = {}

        def note(kit: Kit) -> Event:
            assert isinstance(kit.objective, OnGrid)
            learned.update(kit.objective.learned)
            return lambda done: None

        taught = self.taught(checkpoint, context, (note,))
        ranges = {path: [each.limits.low, each.limits.high] for path, each in learned.items()}
        record = self.record(checkpoint, context, {"last loss": taught.losses[-1]}, {RANGES: ranges})
        return checkpoint.after(record, taught.module)


class OnGrid(Distillation):
    """A distillation whose student computes on the grids of INT8. learned: the range of each layer's input, by path;
    layers that read the same tensor share one."""

    def __init__(self, base: Distillation, learned: Mapping[str, LearnedRange]) -> None:
        super().__init__(base.task, base.teacher, base.imitations, own=base.own, share=base.share)
        self.learned = learned

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"learned": {}}

    def join(self, kit: Kit) -> None:
        super().join(kit)
        for part in kit.module.modules():
            if getattr(part, "running_mean", None) is not None:
                part.eval()  # folded into its convolution later: with other statistics the grid would be another
        layers = dict(kit.module.named_modules())
        for path, learned in self.learned.items():
            if path not in layers or multiplies(layers[path]) is None:
                raise RecipeError(
                    f"quantize.qat trains {path} as it is, and a technique has put something else in its place. Remove "
                    f"lora, qlora and layerwise from its techniques"
                )
            kit.undo.append(attach(layers[path], learned))
        own = nn.ModuleList(dict.fromkeys(self.learned.values())).to(kit.device)
        groups, state = kit.groups, kit.weights or kit.module.state_dict

        def both(module: nn.Module) -> Groups:
            return [*groups(module), *groups(own)]

        def weights() -> dict[str, Tensor]:
            return dict(state()) | {f"{RANGES}.{name}": value for name, value in own.state_dict().items()}

        kit.groups, kit.weights = both, weights


def quantized(module: nn.Module, keep: Sequence[str]) -> list[str]:
    """The paths of the layers that are trained on their grids. Raises UsageError where there are none, RecipeError for
    a pattern that names none."""
    paths = [path for path, layer in module.named_modules() if multiplies(layer) is not None]
    for pattern in keep:
        if not any(fnmatch(path, pattern) for path in paths):
            raise RecipeError(f"keep: no layer is named {pattern!r}. {did_you_mean(pattern, paths)}")
    paths = [path for path in paths if not any(fnmatch(path, pattern) for pattern in keep)]
    if not paths:
        raise UsageError("quantize.qat found no linear layer and no convolution to train. Remove the stage")
    return paths


def seen(
    module: nn.Module, paths: Sequence[str], count: int, context: TorchContext
) -> Iterator[tuple[list[str], Histogram]]:
    """What the layers at these paths read, over so many samples: those that read the same tensor together."""
    leader: dict[str, str] = {}
    first: dict[tuple[int, torch.Size], str] = {}
    alive: list[Tensor] = []
    histograms: dict[str, Histogram] = {}

    def look(path: str, layer: nn.Module, values: Tensor) -> None:
        alive.append(values)  # so that its memory is not another tensor's
        leader.setdefault(path, first.setdefault((values.data_ptr(), values.shape), path))
        if leader[path] == path:
            histograms.setdefault(path, Histogram()).add(values.cpu().numpy())

    with torch.inference_mode(), watched(module, paths, look):
        for batch in singles(drawn(context, count), context.task):
            call(module, tensors(batch))
            alive.clear()
            first.clear()
    for path, histogram in histograms.items():
        yield [each for each, chief in leader.items() if chief == path], histogram
