"""What the model says of the rows before it is trained, for objectives that compare it with itself."""

from functools import partial
from pathlib import Path

import numpy as np
import torch

from laconic.arrays import Array
from laconic.data.dataset import Dataset
from train.data.batch_builder import BatchBuilder
from train.data.batch_sampler import BatchSampler, row_lengths
from train.step.train_state import TrainState

REFERENCE = "reference"
"""The folder, in that of the run, of what the model said before training."""


def complete_rows(state: TrainState, dataset: Dataset, folder: Path, rows: int) -> Dataset:
    """Return the rows with what the model says of them before training, where the objective compares with it.

    They are measured once, with the techniques of the run, so that training holds no second model. A resumed run reads
    them from the run's folder. rows: of a batch. Every rank calls it, before a snapshot is loaded.
    """
    objective = state.objective
    if not objective.has_reference:
        return dataset
    path = folder / REFERENCE / f"{dataset.fingerprint}.npy"
    if state.strategy.any(not path.is_file()):
        values = measure_rows(state, dataset, min(rows, state.micro_batch_rows or rows))
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{state.strategy.data_part[0]}")
        with partial.open("wb") as file:
            np.save(file, values)
        partial.replace(path)
    return objective.add_reference(dataset, np.load(path, allow_pickle=False))


def measure_rows(state: TrainState, dataset: Dataset, rows: int) -> Array:
    """Measure what is kept of all rows, [rows, 2] float64. Each rank measures a part of them.

    The batches are those of an evaluation: rounding is then the same, and a model that has learned nothing shows no
    margin.
    """
    sampler = BatchSampler(len(dataset.keys), rows, seed=0, lengths=row_lengths(dataset))
    builder = BatchBuilder(dataset, dataset.samples, state.objective.collate)
    values = torch.zeros((len(dataset.keys), 2), dtype=torch.float64)
    part, parts = state.strategy.data_part
    module, is_training = state.module, state.module.training
    module.eval()
    try:
        with torch.no_grad(), state.strategy.gather_weights():
            for start in range(0, sampler.steps, parts):
                state.stop_if_asked()
                # All ranks run the model equally often: at the end some repeat a batch, and add nothing.
                number = min(start + part, sampler.steps - 1)
                members = sampler.batch(number)
                batch = {name: tensor.to(state.device) for name, tensor in builder.collate(members).items()}
                with state.forward_context():
                    measured = state.strategy.compute(partial(state.objective.measure_reference, module, batch))
                if number == start + part:
                    values[members] = measured.double().cpu()
    finally:
        module.train(is_training)
    total: Array = (state.strategy.average(values.to(state.device)) * parts).cpu().numpy()
    return total
