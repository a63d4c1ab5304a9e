"""Does NVIDIA DALI load images of training faster than Pillow, and are the pixels the same?

    pip install 'laconic[dali]'
    python benchmarks/dali_images.py [--rows 64]

Scikit-learn's two photographs, cropped at random to 480 x 300 and stored as PNG and JPEG, are loaded at 224 x 224 as
`loader: {image_backend: ...}` does it, with one thread and without a GPU. Rows per second are of processor time.
Differences are of values of 0 to 255.
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from results import Results, make_parser
from sklearn.datasets import load_sample_images

from laconic.data.reader import read
from laconic.tasks.image_classification import ImageClassification
from laconic.tasks.image_preprocess import ImagePreprocess
from laconic.tensor import BATCH, TensorSpec
from train.data.dali_images import FILTERS, DaliImages

SIDE, CROP = 224, (480, 300)
TURNS = 3
HEAD = ("format", "filter", "values that differ", "mean difference", "largest", "Pillow, rows/s", "DALI, rows/s")


def write_images(folder: Path, rows: int) -> None:
    """Write crops of the photographs as PNG and JPEG files, in a folder for each."""
    rng, photographs = np.random.default_rng(0), load_sample_images().images
    for number in range(rows):
        left, top = (int(rng.integers(0, 100)) for _ in "xy")
        image = Image.fromarray(photographs[number % 2]).crop((left, top, left + CROP[0], top + CROP[1]))
        for suffix in ("png", "jpeg"):
            (folder / suffix).mkdir(exist_ok=True)
            image.save(folder / suffix / f"{number:03}.{suffix}", quality=90)


def make_task(resample: int) -> ImageClassification:
    """Make a task whose pixels are whole numbers. resample: Pillow's filter."""
    preprocess = ImagePreprocess(resize=(SIDE, SIDE), resample=resample, scale=1.0)
    spec = TensorSpec(name="pixel_values", dtype="float32", shape=(BATCH, 3, SIDE, SIDE))
    return ImageClassification((spec,), preprocess=preprocess)


def time_load(load: Callable[[], object]) -> float:
    """Time one load of all images, in seconds of the processor over all threads."""
    began = time.process_time()
    load()
    return time.process_time() - began


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=64, help="images of each format")
    arguments = parser.parse_args()
    rows, results = arguments.rows, Results(publish=arguments.publish)
    results.begin("images", HEAD)
    with tempfile.TemporaryDirectory() as name:
        write_images(Path(name), rows)
        for suffix in ("png", "jpeg"):
            for resample in sorted(FILTERS):
                task = make_task(resample)
                dataset = read(Path(name) / suffix, task)
                dali = DaliImages(task, dataset, device=torch.device("cpu"), threads=1)
                loads: tuple[Callable[[], list[Any]], ...] = (
                    partial(list, dataset.samples),
                    partial(dali.decode, dataset.samples.sources),
                )
                ours, theirs = (np.stack(load()) for load in loads)
                difference = np.abs(ours - theirs).round()
                best = [0.0, 0.0]
                for _ in range(TURNS):
                    best = [max(rate, rows / time_load(load)) for rate, load in zip(best, loads, strict=True)]
                figures = [f"{(difference > 0).mean():.1%}", f"{difference.mean():.3f}", f"{difference.max():.0f}"]
                filter_name = Image.Resampling(resample).name
                results.add("images", [suffix, filter_name, *figures, *(f"{rate:.0f}" for rate in best)])


if __name__ == "__main__":
    main()
