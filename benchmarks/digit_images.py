"""A convolutional network that reads handwritten digits: trained here in seconds, compressed, timed."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

from compress.pipeline import compress
from export.sources import open_source
from laconic.arrays import Array
from laconic.cache import Cache
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe
from laconic.tensor import TensorSpec
from laconic.timing.benchmark import benchmark_sessions
from laconic.timing.measurements import ORIGINAL

SEEN, GIVEN = 900, 400
"""Images to train with, and images that `compress` gets; the others judge."""
SIDE = 16
"""Pixels of an image, each of the original's 8 repeated."""


class Residual(nn.Module):
    """Two convolutions and what went into them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width, height, width]."""
        summed: Tensor = x + self.body(x)
        return summed.relu()


def build() -> nn.Module:
    """[batch, 1, 16, 16] to [batch, 10], a ResNet with three stages."""
    layers: list[nn.Module] = []
    for before, width, stride in ((1, 32, 1), (32, 64, 2), (64, 128, 2)):
        layers += [nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        layers.append(Residual(width))
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    model.inputs = (TensorSpec(name="image", dtype="float32", shape=("batch", 1, SIDE, SIDE)),)  # type: ignore[assignment]
    return model


def trained(images: np.ndarray, labels: np.ndarray, make: Callable[[], nn.Module] = build) -> nn.Module:
    """Eight passes over the images, in an order that is drawn anew for each; always the same."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    x, y = torch.from_numpy(images), torch.from_numpy(labels)
    for _ in range(8):
        for rows in torch.randperm(len(x)).reshape(-1, 50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model


def read_digits(salt: int = 0) -> tuple[Array, Array]:
    """Read the images [1797, 1, 16, 16] float32, each pixel of the original four times, and their labels.

    salt: chooses their order, and so which SEEN are trained with, which GIVEN are compressed with, and which judge.
    """
    digits = load_digits()
    images = np.kron(digits.images, np.ones((1, 2, 2)))[:, None].astype(np.float32) / 16
    order = np.random.default_rng(salt).permutation(len(images))
    return images[order], digits.target.astype(np.int64)[order]


def prepared(folder: Path) -> Recipe:
    """Train, write weights and images to a folder, and name them: the images that are left judge."""
    images, labels = read_digits()
    with Steps().step("train on digits"):
        model = trained(images[:SEEN], labels[:SEEN])
    weights = folder / "digits.safetensors"
    save_file(model.state_dict(), weights)
    parts = {"calibrate": slice(SEEN, SEEN + GIVEN), "evaluate": slice(SEEN + GIVEN, None)}
    for name, part in parts.items():
        np.savez(folder / f"{name}.npz", image=images[part], label=labels[part])
    return Recipe.parse(
        {
            "source": str(weights),
            "builder": "digit_images:build",
            "task": "image-classification",
            "data": {name: str(folder / f"{name}.npz") for name in parts},
        }
    )


def measure(folder: Path, rounds: int, sizes: list[int]) -> dict[str, Any]:
    """Accuracy of the original and of the artifact on images that neither training nor compression saw; speed."""
    recipe = prepared(folder)
    cache = Cache(folder / "cache")
    artifact = compress(recipe, folder / "digits.laconic", cache=cache).artifact
    source = open_source(recipe, cache, trust=False)
    with ExitStack() as stack, Steps().step("time both in turns", len(sizes)) as step:
        sessions = {ORIGINAL: stack.enter_context(source.open(1)), "artifact": stack.enter_context(artifact.open())}
        times = benchmark_sessions(
            sessions, artifact.task(), baseline=ORIGINAL, batches=tuple(sizes), threads=1, step=step, rounds=rounds,
            patience=math.inf,
        )  # fmt: skip
    assert artifact.manifest.verdict is not None
    (drift,) = artifact.manifest.verdict.drift
    return {
        "images": drift.samples,
        "figures": drift.figures,
        "intervals": drift.intervals,
        "MB": [source.size / 1e6, artifact.size / 1e6],
        "engine": f"{artifact.manifest.placement}, {artifact.manifest.compute}",
        "timings": [time.model_dump() for time in times],
    }


def rows(found: dict[str, Any], speed: list[list[str]]) -> list[list[str]]:
    """The original's row and the artifact's. speed: their cells, behind a name."""
    figures = found["figures"]
    low, high = found["intervals"]["metric_change"]
    change = f"{figures['metric_change']:+.4f} ({low:+.4f} to {high:+.4f})"
    return [
        ["torch eager, FP32", f"{found['MB'][0]:.2f}", f"{figures['metric_original']:.4f}", "", *speed[0][1:]],
        [
            f"`compress` ({found['engine']})",
            f"{found['MB'][1]:.2f}",
            f"{figures['metric']:.4f}",
            change,
            *speed[1][1:],
        ],
    ]
