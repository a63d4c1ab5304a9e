"""Does NVIDIA DALI load images of training faster than Pillow, and are the pixels the same?

    pip install nvidia-dali-cuda120
    python benchmarks/dali_images.py [--rows 64]

Scikit-learn's two photographs, cropped at random to 480 x 300 and stored as PNG and JPEG, are decoded and resized to
224 x 224 on one thread without a GPU. Rows per second are of processor time. Differences are of values of 0 to 255.
"""

import importlib
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from results import Results, make_parser
from sklearn.datasets import load_sample_images

SIDE, CROP = 224, (480, 300)
FILTERS = {"BILINEAR": "INTERP_TRIANGULAR", "BICUBIC": "INTERP_CUBIC", "LANCZOS": "INTERP_LANCZOS3"}
"""Filters of Pillow, as checkpoints name them, and DALI's."""
TURNS = 3
HEAD = ("format", "filter", "values that differ", "mean difference", "largest", "Pillow, rows/s", "DALI, rows/s")


def write_images(folder: Path, rows: int) -> None:
    """Write crops of the photographs as PNG and JPEG files."""
    rng, photographs = np.random.default_rng(0), load_sample_images().images
    for number in range(rows):
        left, top = (int(rng.integers(0, 100)) for _ in "xy")
        image = Image.fromarray(photographs[number % 2]).crop((left, top, left + CROP[0], top + CROP[1]))
        image.save(folder / f"{number:03}.png")
        image.save(folder / f"{number:03}.jpeg", quality=90)


def load_by_pillow(paths: Sequence[Path], resample: str) -> NDArray[np.int16]:
    """Load images as the loader does: [rows, SIDE, SIDE, 3] int16."""
    sampling = Image.Resampling[resample]
    images = [Image.open(path).convert("RGB").resize((SIDE, SIDE), sampling) for path in paths]
    return np.stack([np.asarray(image, np.int16) for image in images])


def make_pipeline(paths: Sequence[Path], resample: str) -> Any:
    """Make the pipeline of DALI that loads all images in one batch, on the calling thread."""
    dali = importlib.import_module("nvidia.dali")
    types, fn = importlib.import_module("nvidia.dali.types"), importlib.import_module("nvidia.dali.fn")

    @dali.pipeline_def(  # type: ignore[untyped-decorator, unused-ignore]
        batch_size=len(paths), num_threads=1, device_id=None, exec_pipelined=False, exec_async=False
    )
    def load() -> Any:
        content, _ = fn.readers.file(files=list(map(str, paths)), device="cpu")
        image = fn.decoders.image(content, device="cpu", output_type=types.RGB)
        return fn.resize(image, size=[SIDE, SIDE], interp_type=getattr(types, FILTERS[resample]))

    pipeline = load()
    pipeline.build()
    return pipeline


def time_load(load: Callable[[], Any]) -> float:
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
            paths = sorted(Path(name).glob(f"*.{suffix}"))
            for resample in FILTERS:
                pipeline = make_pipeline(paths, resample)
                loaded = np.stack([np.asarray(image) for image in pipeline.run()[0]]).astype(np.int16)
                difference = np.abs(loaded - load_by_pillow(paths, resample))
                loads = partial(load_by_pillow, paths, resample), pipeline.run
                best = [0.0, 0.0]
                for _ in range(TURNS):
                    best = [max(rate, rows / time_load(load)) for rate, load in zip(best, loads, strict=True)]
                figures = [f"{(difference > 0).mean():.1%}", f"{difference.mean():.3f}", str(difference.max())]
                results.add("images", [suffix, resample, *figures, *(f"{rate:.0f}" for rate in best)])


if __name__ == "__main__":
    main()
