"""How soon a run that goes on has its first rows: opening the data, and the rows of a step.

    python benchmarks/first_row.py MODEL [--rows 500000]

MODEL is all-MiniLM-L6-v2 or a like folder. Writes that many texts with classes to a Parquet file. Seconds are those of
this process on a processor.
"""

import argparse
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from laconic.data.reader import read
from train.data.batch_sampler import BatchSampler
from train.finetune.head import open_for
from train.settings import TrainingData, TrainingRecipe

BATCH, GROUP, EPOCHS = 32, 10_000, 40


def main() -> None:
    """Write rows, open them, and print how long steps of different epochs wait for theirs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=500_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        texts = [f"row {number} " + "word " * 20 for number in range(arguments.rows)]
        labels = ["odd" if number % 2 else "even" for number in range(arguments.rows)]
        pq.write_table(pa.table({"text": texts, "label": labels}), path, row_group_size=GROUP)
        begin = time.process_time()
        data = TrainingData(train=path)
        task = open_for(TrainingRecipe(source=str(arguments.model), task="text-classification", data=data)).task
        print(f"the model, with the classes of all rows: {time.process_time() - begin:.1f} s", flush=True)
        begin = time.process_time()
        samples = read(path, task).samples
        print(f"all rows, for their keys: {time.process_time() - begin:.1f} s", flush=True)
        sampler = BatchSampler(arguments.rows, BATCH, 0, 0, 2)
        for step in (0, sampler.steps // 2, EPOCHS * sampler.steps - 1):
            begin = time.process_time()
            rows = [samples[number] for number in sampler.batch(step)]
            print(f"the {len(rows)} rows of step {step + 1}: {time.process_time() - begin:.3f} s", flush=True)


if __name__ == "__main__":
    main()
