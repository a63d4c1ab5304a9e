"""Memory and time of quantizing a Llama a layer at a time, from shards with random weights.

    python benchmarks/out_of_core.py FOLDER --shape 8b [--stage quantize.awq] [--layers 2] [--samples 32] [--kills 5]

Writes a model of the shape of Llama 3 to FOLDER in BF16, a shard for each layer, and docstrings of the standard library
beside it, whose tokens are bytes; then runs `laconic compress` in a process of its own, and prints the largest resident
memory of that process, its steps, and what it wrote. With --layers the model has so many layers: each takes the same
memory and time. With --kills it runs again with an empty cache and is killed so many times, at random moments; the
files must be equal.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers
from inputs import DOCSTRINGS
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from laconic.hashing import digest_file

SHAPES = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
COMMON = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192, "dtype": "bfloat16"}
DEVIATION = 0.02
TEXTS = 120


def main() -> None:
    """Make the model, quantize it, and print what that took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--stage", choices=("quantize.gptq", "quantize.awq"), default="quantize.gptq")
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the shape has")
    parser.add_argument("--samples", type=int, default=32, help="texts to calibrate with, of 95 tokens")
    parser.add_argument("--kills", type=int, default=0)
    arguments = parser.parse_args()
    source = arguments.folder / "model"
    if not source.is_dir():
        write_model(source, arguments.shape, arguments.layers)
        write_texts(arguments.folder)
    write_recipe(arguments.folder, arguments.stage, arguments.samples)
    print(f"source: {sum(file.stat().st_size for file in source.glob('*.safetensors')) / 1e9:.2f} GB", flush=True)
    start = time.perf_counter()
    peak, processor = run(arguments.folder, "whole", None)
    seconds = time.perf_counter() - start
    print(
        f"largest resident memory: {peak / 2**30:.2f} GiB; {seconds:.0f} s, of the processor {processor:.0f}",
        flush=True,
    )
    report = json.loads((arguments.folder / "whole" / "report.json").read_text(encoding="utf-8"))
    print(json.dumps(report["drift"]["figures"]), json.dumps(report["stages"][-1]["figures"]))
    if arguments.kills:
        generator = random.Random(0)
        moments = sorted(generator.uniform(0.1, 0.95) * seconds for _ in range(arguments.kills))
        for before, moment in zip([0.0, *moments], moments, strict=False):
            run(arguments.folder, "killed", moment - before)
        run(arguments.folder, "killed", None)
        one, other = (digest(arguments.folder / name) for name in ("whole", "killed"))
        print(f"killed {arguments.kills} times: {'equal bytes' if one == other else 'OTHER BYTES'}")


def write_model(folder: Path, shape: str, layers: int | None) -> None:
    """Write config.json, the tokenizer and random weights, a layer at a time."""
    settings = COMMON | SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})
    config = transformers.LlamaConfig(**settings, tie_word_embeddings=shape == "1b", architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    torch.manual_seed(0)
    places: dict[str, str] = {}
    parts = [(f"model.layers.{number}", layer) for number, layer in enumerate(model.model.layers)]
    shards = [{f"{path}.{name}": value for name, value in layer.named_parameters()} for path, layer in parts]
    within = {name for shard in shards for name in shard}
    shards.append({name: value for name, value in model.named_parameters() if name not in within})
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: draw(value) for name, value in shard.items()}, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    words = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    (folder / "tokenizer_config.json").write_text(words, encoding="utf-8")


def draw(value: Tensor) -> Tensor:
    """Draw random weights of a shape, in BF16; norms are ones."""
    if value.ndim == 1:
        return torch.ones(value.shape, dtype=torch.bfloat16)
    return torch.empty(value.shape, dtype=torch.bfloat16).normal_(std=DEVIATION)


def write_texts(folder: Path) -> None:
    """Write docstrings of the standard library."""
    everything = folder / "docstrings.jsonl"
    subprocess.run([sys.executable, DOCSTRINGS, everything], check=True, stdout=subprocess.DEVNULL)
    lines = everything.read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "texts.jsonl").write_text("".join([line for line in lines if len(line) > 200][:TEXTS]), encoding="utf-8")


def write_recipe(folder: Path, stage: str, samples: int) -> None:
    """Write the recipe: a stage with groups of 128 inputs."""
    stage = f"{stage}: {{group_size: 128, mixed_precision: false, samples: {samples}}}"
    text = f"source: model\ntask: text-generation\ndata: texts.jsonl\nto: checkpoint\nstages:\n  - {stage}\n"
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")


def run(folder: Path, name: str, seconds: float | None) -> tuple[int, float]:
    """Run the command, killed after so many seconds; return its largest resident memory in bytes, and the seconds of
    the processor that it took."""
    environment = os.environ | {"LACONIC_CACHE": str(folder / f"{name}-cache")}
    if seconds is None:
        shutil.rmtree(folder / name, ignore_errors=True)
    command = [sys.executable, "-m", "laconic", "compress", "--recipe", str(folder / "recipe.yaml")]
    process = subprocess.Popen([*command, "-o", str(folder / name)], env=environment)
    if seconds is not None:
        time.sleep(seconds)
        process.kill()
    _, status, usage = os.wait4(process.pid, 0)
    if seconds is None and os.waitstatus_to_exitcode(status) not in (0, 3):
        sys.exit(f"laconic compress ended with {os.waitstatus_to_exitcode(status)}")
    return usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime


def digest(folder: Path) -> dict[str, str]:
    """Digest the weight files of a checkpoint."""
    return {file.name: digest_file(file).sha256 for file in sorted(folder.glob("*.safetensors"))}


if __name__ == "__main__":
    main()
