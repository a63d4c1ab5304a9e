"""What the cache of an encoder-decoder is worth: tokens per second of processor time, one thread.

    python benchmarks/writing.py FOLDER [--tokens 64] [--length 64] [--rounds 5]

A model of the size of T5-small with random weights, in FP32 and with all layers in INT8, writes so many tokens for 1
and for 8 texts. Compared, in turn: Laconic's session; the same decoder without the cache, which computes all earlier
tokens again at each step; and transformers' `generate`, greedily, with its own cache. Files are kept in FOLDER.
"""

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from family_checkpoint import WORDS, save_tokenizer
from results import Results, make_parser

from compress.quantize.calibration import observe_activations
from compress.quantize.ranges import minmax
from export.candidates.engine_option import EngineOption
from export.sources import capture_graph
from laconic.arrays import Arrays
from laconic.cache import Cache
from laconic.models.encoder_decoder import EncoderDecoder
from laconic.models.source import CheckpointSource
from laconic.models.source_loading import load_source
from laconic.quantization.plan import Plan, Precision
from laconic.runtimes.encoder_decoder_session import EncoderDecoderSession
from laconic.runtimes.onnxruntime import OnnxRuntime
from laconic.tasks.decoder_tensors import NEW_TOKENS
from laconic.tasks.generation_settings import GenerationSettings

ROWS = (1, 8)
ENGINES = ("onnxruntime", "openvino")


def main() -> None:
    """Time, and print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=64, help="written for each text")
    parser.add_argument("--length", type=int, default=64, help="tokens of a text")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    torch.set_num_threads(1)
    source = write_model(arguments.folder / "t5")
    checkpoint = load_source(source)
    task, module = checkpoint.task, checkpoint.module
    assert isinstance(module, EncoderDecoder)
    results.begin("speed", ["engine", "layers", "texts", "tokens/s", "without the cache", "transformers"])
    for engine in ENGINES:
        for layers, path in build_models(arguments.folder, source, engine).items():
            with EngineOption(engine, "float32").open(path, 1) as session:
                assert isinstance(session, EncoderDecoderSession)
                for rows in ROWS:
                    texts = task.timed(rows, arguments.length) | {NEW_TOKENS: np.array(arguments.tokens)}
                    runs: dict[str, Callable[[], Any]] = {
                        "cache": partial(session.run, texts),
                        "whole": partial(write_whole, session, texts),
                        "transformers": partial(write_by_transformers, module, texts),
                    }
                    speeds = [rows * arguments.tokens / each for each in measure(runs, arguments.rounds).values()]
                    results.add("speed", [engine, layers, str(rows), *(f"{each:.0f}" for each in speeds)])


def measure(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median seconds of processor time of each run, in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if number:  # the first warms up
                seconds[name].append(time.process_time() - start)
    return {name: float(np.median(each)) for name, each in seconds.items()}


def write_whole(session: EncoderDecoderSession, texts: Arrays) -> None:
    """Write by running the decoder on all tokens so far at each step; the encoder runs once."""
    source = {name: array for name, array in texts.items() if name != NEW_TOKENS}
    encoded = session.encode(source)
    rows, count = len(source["input_ids"]), int(texts[NEW_TOKENS])
    ids = np.zeros((rows, 1), np.int64)
    for _ in range(count):
        logits = session.decode(encoded, ids)["logits"]
        ids = np.concatenate([ids, logits[:, -1].argmax(axis=-1)[:, None]], axis=1)


def write_by_transformers(module: EncoderDecoder, texts: Arrays) -> None:
    """Write as transformers does."""
    source = {name: torch.from_numpy(array) for name, array in texts.items() if name != NEW_TOKENS}
    module.generate(source, GenerationSettings.of_length(int(texts[NEW_TOKENS])))


def build_models(folder: Path, source: Path, engine: str) -> dict[str, Path]:
    """The model files for an engine, in FP32 and with all layers in INT8."""
    checkpoint = load_source(source)
    graph = capture_graph(CheckpointSource.of(checkpoint), Cache(folder / "cache"))
    rng = np.random.default_rng(0)
    texts = [checkpoint.task.encode([" ".join(rng.choice(WORDS, 40))]) for _ in range(4)]
    histograms = observe_activations(graph, texts, OnnxRuntime(), folder).histograms
    ranges = {name: minmax(histogram) for name, histogram in histograms.items()}
    paths = {}
    precisions: dict[str, Precision] = {"FP32": "float32", "INT8": "int8"}
    for layers, precision in precisions.items():
        paths[layers] = folder / f"{engine}-{layers}" / "model.onnx"
        paths[layers].parent.mkdir(exist_ok=True)
        plan = Plan(dict.fromkeys((layer.node for layer in graph.layers), precision), ranges)
        EngineOption(engine, "float32").build(graph, plan, paths[layers])
    return paths


def write_model(folder: Path) -> Path:
    """A model of the size of T5-small."""
    if not folder.exists():
        torch.manual_seed(0)
        config = transformers.T5Config(vocab_size=32128, d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8)
        config.decoder_start_token_id = 0
        made = folder.with_suffix(".new")
        shutil.rmtree(made, ignore_errors=True)
        transformers.T5ForConditionalGeneration(config).save_pretrained(made)
        save_tokenizer(made)
        made.rename(folder)
    return folder


if __name__ == "__main__":
    main()
