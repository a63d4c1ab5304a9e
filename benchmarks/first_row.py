"""How soon a run has its first rows: opening the data when it starts and when it starts again, and the rows of a step.

    python benchmarks/first_row.py MODEL [--rows 500000] [--format parquet|tar|jsonl]

MODEL is all-MiniLM-L6-v2 or a like folder. Writes that many texts with classes to a file. Seconds are those of this
process on a processor, without those in which libraries are imported.
"""

import argparse
import io
import json
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from laconic.cache import VARIABLE
from laconic.progress import Steps
from train.data.batch_sampler import BatchSampler
from train.finetune.finetune import read_datasets
from train.finetune.head import labels_of, open_for
from train.settings import TrainingData, TrainingRecipe

BATCH, GROUP, EPOCHS = 32, 10_000, 40
TASK = "text-classification"
T = TypeVar("T")


def write_parquet(path: Path, texts: Sequence[str], labels: Sequence[str]) -> None:
    """Write rows to a Parquet file."""
    pq.write_table(pa.table({"text": texts, "label": labels}), path, row_group_size=GROUP)


def write_tar(path: Path, texts: Sequence[str], labels: Sequence[str]) -> None:
    """Write rows to an archive as WebDataset does."""
    with tarfile.open(path, "w") as archive:
        for number, row in enumerate(zip(texts, labels, strict=True)):
            for extension, value in zip(("txt", "cls"), row, strict=True):
                member = tarfile.TarInfo(f"{number:07}.{extension}")
                member.size = len(value)
                archive.addfile(member, io.BytesIO(value.encode()))


def write_jsonl(path: Path, texts: Sequence[str], labels: Sequence[str]) -> None:
    """Write rows to a file of lines."""
    rows = (json.dumps({"text": text, "label": label}) for text, label in zip(texts, labels, strict=True))
    path.write_text("\n".join(rows), encoding="utf-8")


FORMATS = {"parquet": write_parquet, "tar": write_tar, "jsonl": write_jsonl}


def report(what: str, function: Callable[[], T]) -> T:
    """Call a function, and print how long the processor took."""
    begin = time.process_time()
    result = function()
    print(f"{what}: {time.process_time() - begin:.3f} s", flush=True)
    return result


def main() -> None:
    """Write rows, open them twice, and print how long steps of different epochs wait for theirs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--format", choices=list(FORMATS), default="parquet")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[VARIABLE] = f"{folder}/cache"
        path = Path(folder) / f"rows.{arguments.format}"
        texts = [f"row {number} " + "word " * 20 for number in range(arguments.rows)]
        labels = ["odd" if number % 2 else "even" for number in range(arguments.rows)]
        FORMATS[arguments.format](path, texts, labels)
        data = TrainingData(train=path)
        recipe = TrainingRecipe(source=str(arguments.model), task=TASK, data=data)
        for start in ("first start", "start again"):
            report(f"{start}, classes of all rows", partial(labels_of, path, TASK))
            checkpoint = report(f"{start}, the model", partial(open_for, recipe))
            read = partial(read_datasets, recipe, checkpoint, Steps(quiet=True))
            train, _ = report(f"{start}, rows for training and validation", read)
        sampler = BatchSampler(len(train.keys), BATCH, 0, 0, 2)
        for step in (0, sampler.steps // 2, EPOCHS * sampler.steps - 1):
            batch = train.samples.pick(sampler.batch(step))
            report(f"the {len(batch)} rows of step {step + 1}", partial(list, batch))


if __name__ == "__main__":
    main()
