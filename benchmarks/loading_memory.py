"""Host memory that ranks take to open a checkpoint and keep their parts of it, as docs/past-one-device.md has it.

    python benchmarks/loading_memory.py [--ranks 2 4] [--dtypes float32 bfloat16 saved]

A Llama with random weights is opened as `laconic finetune` opens it and spread over ranks of this machine by a mesh.
Its weights are those that transformers writes in a precision, or those of a checkpoint that Laconic has saved.
Figures are of all ranks together, beyond what they take with a model of almost no weights, in multiples of the weights
in FP32: memory that the system cannot reclaim at its peak and when the weights are spread, and mapped pages of files.
"""

import json
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess as Process
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
import transformers
from results import Results, make_parser
from tokenizers import Tokenizer, models, pre_tokenizers

from laconic.cache import Cache
from laconic.models.source_loading import load_source
from laconic.progress import Steps
from train.finetune.finetune import prepare
from train.parallel.mesh import Mesh
from train.parallel.pipeline import make_pipeline
from train.parallel.ranks import Ranks, open_ranks
from train.settings import TrainingData, TrainingRecipe
from train.trainer import start_training

CPU = torch.device("cpu")
SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 8}
POLL = 0.02
"""Seconds between two readings."""
SAVED = "saved"
AXES = ("shard", "tensor", "pipeline")
Reading = tuple[int, int, int]
"""Bytes: the peak and the end of what cannot be reclaimed, and the peak of mapped pages of files."""


def write_model(folder: Path, dtype: str, shape: Mapping[str, int]) -> int:
    """Write a Llama of a shape, its tokenizer and rows to train on; returns the bytes of its weights in FP32. dtype: of
    the weights that transformers writes, or SAVED."""
    if dtype == SAVED:
        size = write_model(folder.with_name(f"{folder.name}-source"), "float32", shape)
        load_source(folder.with_name(f"{folder.name}-source")).save(folder)
        write_rows(folder)
        return size
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="a", pad_token="a")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, num_attention_heads=4, vocab_size=256))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    write_rows(folder)
    return sum(4 * weight.numel() for weight in model.parameters())


def write_rows(folder: Path) -> None:
    """Write rows to train on."""
    rows = [json.dumps({"prompt": "a" * 8, "completion": chr(97 + number) * 8}) for number in range(16)]
    (folder / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")


def open_model(rank: int, world: int, port: int, folder: Path, mesh: Mapping[str, Any], ready: Barrier) -> None:
    """Open the model on one rank and spread it; wait before and after."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    os.environ |= place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    data = TrainingData(train=folder / "rows.jsonl")
    recipe = TrainingRecipe(source=str(folder), data=data, mesh=Mesh(**mesh), batch_size=8)
    with open_ranks(CPU, recipe.mesh) as ranks:
        ready.wait()
        ready.wait()
        state = spread_model(recipe, ranks)
        ready.wait()
        ready.wait()
        del state


def spread_model(recipe: TrainingRecipe, ranks: Ranks) -> object:
    """Open the model of a recipe and keep this rank's part."""
    inputs = prepare(recipe, False, ranks, Steps(quiet=True), Cache())
    batch = inputs.objective.make_example(8, 16)
    pipeline = make_pipeline(recipe.mesh, ranks, batch)
    return start_training(inputs.checkpoint.module, inputs.objective, recipe, ranks, 1, pipeline)


def count_bytes(processes: Sequence[Process]) -> tuple[int, int]:
    """Count the bytes that processes have in memory, a page that several map once: those that the system cannot
    reclaim, and pages of files."""
    kept, files = 0, 0
    for process in processes:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
        sizes = {name: int(size) for name, size, *_ in (line.split() for line in lines[1:])}
        kept += sizes["Pss_Anon:"] + sizes["Pss_Shmem:"]
        files += sizes["Pss_File:"]
    return 1024 * kept, 1024 * files


def measure(world: int, folder: Path, mesh: Mapping[str, Any]) -> Reading:
    """Measure what all ranks take to open and spread a model."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["loading_memory"])
    ready = context.Barrier(world + 1)
    processes: list[Process] = []
    for rank in range(world):
        processes.append(context.Process(target=open_model, args=(rank, world, port, folder, mesh, ready)))
        processes[-1].start()
    ready.wait()
    ready.wait()
    peak = mapped = 0
    while ready.n_waiting < world:
        kept, files = count_bytes(processes)
        peak, mapped = max(peak, kept), max(mapped, files)
        time.sleep(POLL)
    end, _ = count_bytes(processes)
    ready.wait()
    ready.wait()
    for process in processes:
        process.join()
    return max(peak, end), end, mapped


def main() -> None:
    """Print a row for each axis, number of ranks and precision of the weight file."""
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", SAVED])
    parser.add_argument("--axes", nargs="+", default=list(AXES), choices=list(AXES))
    options = parser.parse_args()
    results = Results(publish=options.publish)
    results.begin("memory", ["weight file", "mesh", "peak", "spread", "mapped pages"])
    for dtype in options.dtypes:
        with tempfile.TemporaryDirectory() as name:
            folders = {"small": Path(name) / "small", "large": Path(name) / "large"}
            write_model(folders["small"], dtype, SMALL)
            size = write_model(folders["large"], dtype, SHAPE)
            for axis in options.axes:
                for world in options.ranks:
                    small, large = (measure(world, folder, {axis: world}) for folder in folders.values())
                    cells = [f"{(more - less) / size:.2f}" for less, more in zip(small, large, strict=True)]
                    results.add("memory", [dtype, f"{axis} {world}", *cells])


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    main()
