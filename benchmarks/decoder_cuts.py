"""What it costs and gains to remove blocks of a language model, or feed-forward units, beside rounding its weights.

    python benchmarks/decoder_cuts.py CHECKPOINT texts.jsonl FOLDER --train train.jsonl [--layers 0.9] [--ffn 0.84]
        [--steps 200] [--texts 30] [--rounds 5]

Rows: the original; its weights in 4 bits (GPTQ); cut, without and with the least-squares fit; cut and healed; cut,
healed and in 4 bits; and a null, as many blocks at random, fitted and healed alike. Quality is that of perplexity.py,
on docstrings of the standard library that no stage reads; they are a development set once a setting was changed by
them. Tokens per second are those of a lone answer behind 64 tokens, in the paged engine and on one thread, of all
artifacts in turns. Stages are kept in FOLDER, and resumed from there.
"""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from generation import describe, draw_prompts, open_generators, write
from perplexity import (
    FIGURES,
    Distributions,
    describe_quality,
    join_docstrings,
    measure_size,
    open_artifact,
    open_original,
)
from results import Results, make_parser
from tokenizers import Tokenizer

from compress.pipeline import compress, compress_checkpoint
from laconic.arrays import Array
from laconic.artifacts.manifest import MANIFEST
from laconic.cache import Cache
from laconic.models.anatomy import anatomy
from laconic.models.source_loading import load_source
from laconic.recipes.recipe import Recipe

INT4 = {"quantize.gptq": {"bits": 4, "group_size": 32, "symmetric": False, "mixed_precision": False}}
PROMPT, WRITTEN = 64, 48
ORIGINAL = "original"


def main() -> None:
    """Make the models, measure them, and print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path, help="texts to calibrate and to choose by")
    parser.add_argument("folder", type=Path, help="where the models go")
    parser.add_argument("--train", type=Path, required=True, help="texts to heal with")
    parser.add_argument("--layers", type=float, default=0.9, help="the share of the blocks that stays")
    parser.add_argument("--ffn", type=float, default=1.0, help="the share of the feed-forward units that stays")
    parser.add_argument("--steps", type=int, default=200, help="of healing")
    parser.add_argument("--rate", type=float, default=1e-4, help="the learning rate of healing")
    parser.add_argument("--texts", type=int, default=30, help="most texts that judge")
    parser.add_argument("--rounds", type=int, default=5, help="of timing; 0 for none")
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    made = {name: make(arguments, name, stages) for name, stages in list_rows(arguments).items()}
    texts = read_texts(arguments.checkpoint, arguments.data, arguments.texts)
    judged = f"{len(texts)} texts, {sum(map(len, texts)) - len(texts):,} tokens"
    results.begin("cuts", [judged, "MB", *FIGURES])
    original = open_original(arguments.checkpoint, torch.float32)
    expected = [original(text) for text in texts]
    for name, path in made.items():
        model: Distributions = open_artifact(path) if is_artifact(path) else open_original(path, torch.float32)
        quality = describe_quality(expected, [model(text) for text in texts], texts)
        results.add("cuts", [name, f"{measure_size(path) / 1e6:.3g}", *quality])
    if arguments.rounds:
        speeds = measure_speeds({name: path for name, path in made.items() if is_artifact(path)}, arguments.rounds)
        results.table("speeds", ["one at a time", "tokens per second"], list(speeds.items()))


def list_rows(arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """List the stages of each row."""
    count = len(anatomy(load_source(arguments.checkpoint, task="text-generation").module).blocks)
    gone = count - round(count * arguments.layers)
    heal = {"distill.heal": describe_healing(arguments.steps, arguments.rate)}
    ffn = [] if arguments.ffn == 1 else [{"prune.ffn": {"keep": arguments.ffn}}]
    layers = {"keep": arguments.layers, "criterion": "angle"}
    cut: list[dict[str, Any]] = [{"prune.layers": layers}, *ffn] if gone else ffn
    plain = [{name: {**config, "compensate": False} for name, config in stage.items()} for stage in cut]
    rows = {ORIGINAL: [], "4 bits": [INT4], "cut, not fitted": plain, "cut": cut, "cut, healed": [*cut, heal]}
    rows["cut, healed, 4 bits"] = [*cut, heal, INT4]
    if gone:
        drawn = sorted(np.random.default_rng(0).choice(count, gone, replace=False).tolist())
        rows["null: blocks at random, healed"] = [{"prune.layers": {"drop": drawn}}, *ffn, heal]
    return rows


def describe_healing(steps: int, rate: float) -> dict[str, Any]:
    """Describe the settings of healing."""
    return {
        "steps": steps,
        "eval_every": max(1, steps // 4),
        "batch_size": 4,
        "max_length": 128,
        "optimizer": {"adamw": {"lr": rate}},
    }


def make(arguments: argparse.Namespace, name: str, stages: list[dict[str, Any]]) -> Path:
    """Make a model: an artifact of the original and of weights in 4 bits, otherwise a checkpoint."""
    writes = not stages or INT4 in stages
    recipe = Recipe.parse(
        {
            "source": str(arguments.checkpoint),
            "task": "text-generation",
            "data": {"calibrate": str(arguments.data), "train": str(arguments.train)},
            "stages": stages,
            "heal": False,
            "goal": {"fidelity": 0.1},
            **({"engine_only": "openvino"} if writes else {"to": "checkpoint"}),
        }
    )
    folder: Path = arguments.folder
    path = folder / "-".join(re.findall(r"\w+", name))
    (compress if writes else compress_checkpoint)(recipe, path, cache=Cache(folder / "cache"))
    return path


def is_artifact(path: Path) -> bool:
    """Whether a folder is an artifact, and not a checkpoint."""
    return (path / MANIFEST).is_file()


def read_texts(checkpoint: Path, data: Path, most: int) -> list[Array]:
    """Read the tokens of the texts that judge, [tokens] int64 each."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer.no_truncation()
    texts = [np.array(tokenizer.encode(text).ids[:256], np.int64) for text in join_docstrings(data, most)]
    return [text for text in texts if len(text) > 1]


def measure_speeds(artifacts: Mapping[str, Path], rounds: int) -> dict[str, str]:
    """Measure the tokens per second of a lone answer, of all artifacts in turns; the first round warms up."""
    generators = {name: open_generators(path)["paged"] for name, path in artifacts.items()}
    speeds: dict[str, list[float]] = {name: [] for name in artifacts}
    for seed in range(rounds + 1):
        for name, generator in generators.items():
            speed = write(generator, draw_prompts(generator.vocabulary, 1, PROMPT, seed), WRITTEN)
            speeds[name] += [speed] if seed else []
    return {name: describe(values) for name, values in speeds.items()}


if __name__ == "__main__":
    main()
