"""Models of the zoo, saved, captured and calibrated once in a run by whichever of its processes asks first."""

import pickle
from functools import cache, partial

import models
import numpy as np
import pytest
from filelock import FileLock
from safetensors.torch import save_file

from compress.quantize.calibration import observe_activations
from compress.quantize.ranges import minmax
from export.capture.capture import capture
from laconic.models.source_loading import load_source
from laconic.runtimes.onnxruntime import OnnxRuntime
from laconic.tensor import BATCH

SAVED = {
    "bert": partial(models.save_bert, num_hidden_layers=1),
    "distilbert": partial(models.save_distilbert, layers=1),
    "roberta": partial(models.save_roberta, layers=1),
    "embedder": partial(models.save_embedder, layers=1),
    "vit": partial(models.save_vit, layers=1),
    "gpt2": partial(models.save_gpt2, layers=1),
    "llama": partial(models.save_llama, layers=1),
    "t5-encoder": models.save_t5_encoder,
    "bart": models.save_bart,
}
BUILT = {"residual": models.ResidualNet, "mobilenet": models.MobileNet, "lstm": models.BiLstm, "tied": models.Tied}
SWEPT = ("distilbert", "roberta", "bart")
"""Models whose operators and layers others have too."""


def mark_swept(*names):
    """The names as parameters of a test, of which `make test` leaves out some."""
    return [pytest.param(name, marks=pytest.mark.sweep) if name in SWEPT else name for name in names]


ZOO = mark_swept(*SAVED, *BUILT)


def built(folder, module, **arguments):
    """The checkpoint of a module of the zoo, with random weights."""
    made = models.randomize(module(**arguments))
    state = {name: value for name, value in made.state_dict().items() if (module, name) != (models.Tied, "head.weight")}
    path = folder / f"{module.__name__}.safetensors"
    save_file(state, path)
    return load_source(path, builder=f"models:{module.__name__}", arguments=arguments)


def inputs(checkpoint, batch, length, seed=0):
    """Arrays for a run of the model, small in the length that is free."""
    sizes = {axis: length for spec in checkpoint.inputs for axis in spec.shape if isinstance(axis, str)}
    bounds = {axis: limits for spec in checkpoint.inputs for axis, limits in spec.bounds.items()}
    sizes = {axis: int(np.clip(size, *bounds.get(axis, (1, 10**6)))) for axis, size in sizes.items()} | {BATCH: batch}
    arrays = checkpoint.task.sample_inputs(sizes, seed)
    return {name: np.abs(array) % 20 if array.dtype == np.int64 else array for name, array in arrays.items()}


def load(folder, name):
    """Save the model where no process has yet, and open it."""
    if name not in SAVED:
        return built(folder, BUILT[name])
    checkpoint = load_source(folder / "source" if (folder / "source").exists() else SAVED[name](folder / "source"))
    return checkpoint.with_task(checkpoint.task.with_cache(None))  # one graph that is run as a whole


def once(folder, make):
    """What make returns, made by one process of the run and read by the others."""
    path = folder / f"{make.__name__}.pickle"
    if not path.exists():
        made = make()
        path.write_bytes(pickle.dumps(made))
        return made
    return pickle.loads(path.read_bytes())


@cache
def open_captured(root, name):
    """Checkpoint, graph and a function that calibrates."""
    folder = root / name
    folder.mkdir(exist_ok=True)
    with FileLock(root / f"{name}.lock"):
        checkpoint = load(folder, name)

        def graph():
            return capture(checkpoint, folder / "graph")

        return checkpoint, once(folder, graph)


@cache
def calibrate(root, name):
    """The range of each activation over eight batches."""
    checkpoint, graph = open_captured(root, name)

    def ranges():
        batches = [inputs(checkpoint, 2, 4 + number, number) for number in range(8)]
        seen = observe_activations(graph, batches, OnnxRuntime(), root / name)
        return {name: minmax(histogram) for name, histogram in seen.histograms.items()}

    with FileLock(root / f"{name}.lock"):
        return once(root / name, ranges)
