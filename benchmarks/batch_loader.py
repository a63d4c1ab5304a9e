"""How many rows per second reach the training: by worker processes, and by where decoded images are kept.

    python benchmarks/batch_loader.py [--rows 1797] [--batch 32] [--epochs 2]

Images are scikit-learn's digits as PNG files, resized to 224 x 224; texts are the docstrings of Python's standard
library, tokenized. Nothing is computed with the batches, so this is what the feed can give at most. The last lines let
the feed find its workers itself beside a step that takes 20 ms and leaves the cores idle, as one on a GPU does.
"""

import itertools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from inputs import model_folder, texts
from PIL import Image
from results import Results, make_parser
from sklearn.datasets import load_digits
from tokenizers import Tokenizer
from torch import Tensor

from laconic.cache import Cache
from laconic.data.dataset import Dataset
from laconic.data.reader import read
from laconic.tasks.image_classification import ImageClassification
from laconic.tasks.image_preprocess import ImagePreprocess
from laconic.tasks.task import Task
from laconic.tasks.text_embedding import TextEmbedding
from laconic.tensor import TensorSpec
from train.data.batch_loader import BatchLoader
from train.data.batch_sampler import BatchSampler, row_lengths
from train.data.loader_settings import LoaderSettings
from train.data.sample_store import decoder_key

SIDE = 224
STEP = 0.02
"""Seconds of the pretended step."""


@dataclass(frozen=True)
class Encode:
    """Makes a batch as the task does, without labels."""

    task: Task

    def __call__(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> dict[str, Tensor]:
        """The tensors that the task's model takes."""
        return {name: torch.from_numpy(array) for name, array in self.task.encode(samples).items()}


def images(folder: Path, rows: int) -> tuple[Dataset, Task]:
    """Digits as PNG files of 8 x 8 pixels, which become 3 x 224 x 224."""
    for number, image in enumerate(load_digits().images[:rows]):
        Image.fromarray((image * 15.9).astype(np.uint8)).save(folder / f"{number:04}.png")
    spec = TensorSpec(name="pixels", dtype="float32", shape=("batch", 3, SIDE, SIDE))
    task = ImageClassification((spec,), preprocess=ImagePreprocess(resize=(SIDE, SIDE)))
    return read(folder, task), task


def docstrings(folder: Path, rows: int) -> tuple[Dataset, Task]:
    """Texts, and MiniLM's tokenizer."""
    tokenizer = Tokenizer.from_file(str(model_folder(folder) / "tokenizer.json"))
    names = ("input_ids", "attention_mask", "token_type_ids")
    specs = tuple(TensorSpec(name=name, dtype="int64", shape=("batch", "seq")) for name in names)
    task = TextEmbedding(tokenizer, specs, max_tokens=256, pad_id=0)
    return read(texts(folder, rows)[0], task), task


def measured(dataset: Dataset, task: Task, batch: int, epochs: int, folder: Path, **settings: Any) -> list[str]:
    """Cells of the table: seconds until the first batch, the cache filled included, and rows per second after it."""
    order = BatchSampler(len(dataset), batch, seed=0, lengths=row_lengths(dataset))
    began, seen = time.perf_counter(), 0
    with BatchLoader(
        dataset,
        Encode(task),
        order,
        device="cpu",
        settings=LoaderSettings(**settings),
        stop=epochs * order.steps,
        decoder=decoder_key(task),
        cache=Cache(folder),
    ) as feed:
        for step, tensors in feed:
            if step == 0:
                first = time.perf_counter()
            else:
                seen += len(next(iter(tensors.values())))
        return [f"{first - began:.1f}", f"{seen / (time.perf_counter() - first):.0f}"]


def searched(dataset: Dataset, task: Task, batch: int) -> str:
    """What the feed says that found its workers itself."""
    order = BatchSampler(len(dataset), batch, seed=0, lengths=row_lengths(dataset))
    with BatchLoader(dataset, Encode(task), order, device="cpu", stop=100_000) as feed:
        began = time.perf_counter()
        for _ in itertools.takewhile(lambda _: time.perf_counter() - began < 20, feed):
            time.sleep(STEP)
        return feed.report()


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=1797, help="images and texts to read")
    parser.add_argument("--batch", type=int, default=32, help="rows of a batch")
    parser.add_argument("--epochs", type=int, default=2, help="how often every row is read")
    parser.add_argument("--workers", default="0,1,2", help="counts of worker processes, with commas between them")
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    counts = [int(count) for count in arguments.workers.split(",")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for made in (images, docstrings):
            (folder / made.__name__).mkdir()
            dataset, task = made(folder / made.__name__, arguments.rows)
            results.begin(made.__name__, [f"{made.__name__}: workers", "cache", "first batch, s", "rows/s"])
            places = ("none", "memory", "disk", "disk") if made is images else ("none",)
            for number, place in enumerate(places):
                said = "disk, second run" if "disk" in places[:number] else place
                for count in counts:
                    # A folder for each count: only the second run finds what the first one kept.
                    kept = folder / f"cache{count}"
                    cells = measured(dataset, task, arguments.batch, arguments.epochs, kept, workers=count, cache=place)
                    results.add(made.__name__, [str(count), said, *cells])
            print(f"\n{made.__name__}, found beside a step of {STEP:g} s: {searched(dataset, task, arguments.batch)}\n")


if __name__ == "__main__":
    main()
