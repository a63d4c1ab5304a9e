"""Channels cut and layers taken apart, of networks that read digits: accuracy against what is left.

python benchmarks/slim.py channels --keep 0.5
python benchmarks/slim.py factorize --model branches
"""

import copy
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_pruning
from digit_images import GIVEN, SEEN, build, read_digits, trained
from results import Results, make_parser
from torch import nn

from compress.factorize.convolution import Convolution
from compress.factorize.low_rank import LowRank
from compress.prune.channel_allocation import count_positions
from compress.prune.channels import Channels
from laconic.arrays import Array, Arrays
from laconic.cache import Cache
from laconic.data.dataset import Dataset
from laconic.data.reader import make_dataset
from laconic.errors import UsageError
from laconic.models.checkpoint import Checkpoint
from laconic.models.signature import probe_module
from laconic.models.torch_session import TorchSession
from laconic.progress import Steps
from laconic.recipes.stage import TorchContext, TorchStage
from laconic.runtimes.predict import predict
from laconic.tasks.image_classification import ImageClassification
from laconic.tasks.image_preprocess import ImagePreprocess

CHOOSE = 100
"""Of the images that a stage may look at, those that it chooses by."""


class Branches(nn.Module):
    """An inverted bottleneck with a depthwise convolution, summed; a convolution in groups, concatenated."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bottleneck = nn.Sequential(
            nn.Conv2d(width, 2 * width, 1, bias=False), nn.BatchNorm2d(2 * width), nn.Hardswish(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width, bias=False), nn.BatchNorm2d(2 * width),
            nn.Hardswish(), nn.Conv2d(2 * width, width, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.grouped = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, width, height, width] to [batch, 2 width, height, width]."""
        x = x + self.bottleneck(x)
        return torch.cat([x, self.grouped(x)], dim=1)


def build_branches() -> nn.Module:
    """[batch, 1, 16, 16] to [batch, 10]."""
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.Hardswish(), Branches(32),
        nn.MaxPool2d(2), Branches(64), nn.Conv2d(128, 96, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(96 * 16, 10),
    )  # fmt: skip
    model.inputs = build().inputs
    return model


MODELS = {"residual": build, "branches": build_branches}


def opened(name: str, images: Array, labels: Array, folder: Path) -> Checkpoint:
    """The model of this name, trained here, as a checkpoint."""
    file = folder / f"{name}.pt"
    module = MODELS[name]()
    if not file.is_file():
        torch.save(trained(images[:SEEN], labels[:SEEN], MODELS[name]).state_dict(), file)
    module.load_state_dict(torch.load(file, weights_only=True))
    inputs: Any = module.inputs
    task = ImageClassification(inputs, preprocess=ImagePreprocess(channels=1))
    return Checkpoint.of(
        module.eval(), task, outputs=probe_module(module, inputs), source={"kind": "benchmark"}, size=0
    )


def ask(checkpoint: Checkpoint, dataset: Dataset) -> Arrays:
    """The checkpoint's answers."""
    with TorchSession(checkpoint.module, checkpoint.inputs, checkpoint.outputs) as session:
        return predict(session, checkpoint.task, dataset)


def context_of(checkpoint: Checkpoint, given: Dataset, folder: Path) -> TorchContext:
    """What a stage may use: unlabelled images, of which it chooses by a part."""
    choose, look = given.rows(range(CHOOSE), "choose"), given.rows(range(CHOOSE, len(given)), "look")
    reference = ask(checkpoint, choose)
    return TorchContext(
        task=checkpoint.task, key="slim", seed=0, folder=folder, cache=Cache(folder / "cache"),
        steps=Steps(quiet=True), train=look, calibrate=look, choose=choose, original=checkpoint,
        fidelity=lambda one: np.asarray(checkpoint.task.fidelity(reference, ask(one, choose))), work=folder / "work",
    )  # fmt: skip


def accuracy(checkpoint: Checkpoint, dataset: Dataset) -> float:
    """The share of the images that are read rightly."""
    found = ask(checkpoint, dataset)
    return float(checkpoint.task.scorer(found, dataset.labels or [])(np.arange(len(dataset))))


def cost(module: nn.Module) -> tuple[int, int]:
    """Weights, and multiplications for one image."""
    layers: dict[str, Any] = dict(module.named_modules())
    places = count_positions(module, {"image": torch.zeros(2, 1, 16, 16)})
    work = sum(uses * layers[path].weight.numel() for path, uses in places.items())
    return sum(parameter.numel() for parameter in module.parameters()), int(work)


Change = Callable[[Checkpoint, TorchContext], Checkpoint]
PLAIN = {"compensate": False, "recalibrate_batch_norm": False}


def torch_pruning_alone(keep: float) -> Change:
    """Its own pruner, by the magnitude of groups, in multiples of 8."""

    def change(checkpoint: Checkpoint, context: TorchContext) -> Checkpoint:
        module = copy.deepcopy(checkpoint.module).requires_grad_(True)
        heads = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
        pruner = torch_pruning.pruner.BasePruner(
            module, torch.zeros(2, 1, 16, 16), importance=torch_pruning.importance.GroupMagnitudeImportance(p=2),
            pruning_ratio=1 - keep, ignored_layers=heads, round_to=8,
        )  # fmt: skip
        pruner.step()
        return checkpoint.derive(module, checkpoint.task)

    return change


CHANNELS: dict[str, dict[str, Any]] = {
    "`magnitude`, `compensate: false`, `recalibrate_batch_norm: false`": PLAIN,
    "`magnitude`, `compensate: false`": {"compensate": False},
    "`magnitude`, `recalibrate_batch_norm: false`": {"recalibrate_batch_norm": False},
    "`magnitude`": {},
    "`activation`": {"criterion": "activation"},
    "`taylor`": {"criterion": "taylor"},
    "`sparsegpt`": {"criterion": "sparsegpt"},
    "`magnitude`, `steps: 3`": {"steps": 3},
    "`magnitude`, `allocate: sensitivity`": {"allocate": "sensitivity"},
}
"""Settings of `prune.channels`."""


def list_cuts(keep: float) -> Iterator[tuple[str, Change]]:
    """Yield the ways to cut channels, with their names."""
    yield "Torch-Pruning alone, group magnitude", torch_pruning_alone(keep)
    for name, settings in CHANNELS.items():
        yield name, Channels.model_validate({"keep": keep, **settings}).apply


def list_factorizations() -> Iterator[tuple[str, Change]]:
    """Yield the ways to take layers apart, with their names."""
    stages: list[tuple[str, TorchStage]] = [
        *((f"`low-rank`, `energy: {share:.0%}`", LowRank(energy=share)) for share in (0.99, 0.95, 0.9, 0.8)),
        *(
            (f"`low-rank`, `energy: {share:.0%}`, `data_aware: false`", LowRank(energy=share, data_aware=False))
            for share in (0.9, 0.8)
        ),
        *((f"`low-rank`, `keep: {share:.0%}`", LowRank(keep=share)) for share in (0.5, 0.25)),
        *(
            (f"`low-rank`, `keep: {share:.0%}`, `spatial`", LowRank(keep=share, convolutions="spatial"))
            for share in (0.5, 0.25)
        ),
        *((f"`separable`, `depth_multiplier: {n}`", Convolution(depth_multiplier=n, max_error=1)) for n in (1, 2)),
        *((f"`grouped`, `groups: {n}`", Convolution(into="grouped", groups=n, max_error=1)) for n in (2, 4)),
        *(
            (f"`bottleneck`, `width: {share:.0%}`", Convolution(into="bottleneck", width=share, max_error=1))
            for share in (0.5, 0.25)
        ),
    ]
    for name, stage in stages:
        yield name, stage.apply


def main() -> None:
    """Print the rows of a table, one as soon as it is known."""
    parser = make_parser(__doc__)
    parser.add_argument("part", choices=["channels", "factorize"])
    parser.add_argument("--model", choices=sorted(MODELS), default="residual")
    parser.add_argument("--keep", type=float, nargs="*", default=[0.75, 0.5, 0.25])
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "laconic-slim")
    options = parser.parse_args()
    results = Results(publish=options.publish)
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    images, labels = read_digits()
    checkpoint = opened(options.model, images, labels, options.work)
    given = make_dataset(list(images[SEEN : SEEN + GIVEN]), checkpoint.task, name="given")
    judge = make_dataset(
        list(images[SEEN + GIVEN :]), checkpoint.task, labels=labels[SEEN + GIVEN :].tolist(), name="judge"
    )
    weights, work = cost(checkpoint.module)
    print(f"{weights:,} weights, {work:,} multiplications, accuracy {accuracy(checkpoint, judge):.1%}\n")
    attempt = partial(try_change, checkpoint, context_of(checkpoint, given, options.work), judge)
    if options.part == "factorize":
        results.begin("factorize", ["", "accuracy", "weights", "multiplications", "processor time, s"])
        for name, change in list_factorizations():
            if options.only in name:
                results.add("factorize", [name, *attempt(change)])
        return
    shares = [f"{keep:.0%} of the channels" for keep in options.keep]
    results.begin("channels", ["accuracy, weights that are left", *shares])
    for columns in zip(*map(list_cuts, options.keep), strict=True):
        name = columns[0][0]
        if options.only in name:
            results.add("channels", [name, *(", ".join(attempt(change)[:2]) for _, change in columns)])


def try_change(checkpoint: Checkpoint, context: TorchContext, judge: Dataset, change: Change) -> list[str]:
    """Return the accuracy of a changed network, its share of the weights and multiplications, and the seconds of the
    processor; or why there is no such network."""
    start = time.process_time()
    try:
        changed = change(checkpoint, context)
    except UsageError as error:
        return [str(error), "", "", ""]
    seconds = time.process_time() - start
    costs = zip(cost(changed.module), cost(checkpoint.module), strict=True)
    return [f"{accuracy(changed, judge):.1%}", *(f"{after / before:.0%}" for after, before in costs), f"{seconds:.1f}"]


if __name__ == "__main__":
    main()
