"""Families of models through the command line: what runs with the default recipe, and how close the answers are.

    python benchmarks/families.py FOLDER [FAMILY ...] [--timeout 600]

For each family a tiny checkpoint with the real structure and random weights is written to FOLDER, opened, and compared
with transformers on the same texts or images; compressed with the default recipe; pruned to half of its units, and
loaded again; and the artifact is served, its answer over HTTP compared with that of the loaded artifact. Prints a row
of a Markdown table for each family; the output of each command is kept beside the checkpoint. A minute or two for each
family on two cores.
"""

import argparse
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from family_models import FAMILIES, Family, write_images, write_texts
from PIL import Image

from laconic.artifacts.artifact import Artifact
from laconic.commands.http_session import open_served
from laconic.errors import LaconicError
from laconic.models.checkpoint import load_source
from laconic.models.signature import call
from laconic.runtimes.runtime import make_runtime

COMPARED = 8
"""Samples that are compared with transformers."""
PRUNE = {"channels": "prune.channels: {keep: 0.5}", "units": "prune.ffn: {keep: 0.5}\n  - prune.heads: {keep: 0.5}"}
"""Stages by which a family is pruned: of networks of convolutions, and of transformers."""
DONE, MISSED, REFUSED = 0, 3, 2


def main() -> None:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("families", nargs="*", help="default: all", metavar="FAMILY")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one command")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    print("| family | task | agreement | compress | endpoint | prune | reload |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in arguments.families or FAMILIES:
        folder = arguments.folder / name.replace(" ", "-")
        print(run_family(name, FAMILIES[name], folder, arguments.timeout), flush=True)


def run_family(name: str, family: Family, folder: Path, timeout: int) -> str:
    """The row of one family."""
    folder.mkdir(exist_ok=True)
    source = folder / "source"
    if not source.exists():
        family.write(source)
    data = write_images(folder / "images") if family.processor else write_texts(folder / "texts.csv")
    try:
        checkpoint = load_source(source)
        agreement = f"{compare(family, source, data):.0e}"
    except LaconicError as error:
        return f"| {name} | - | refused: {error} | - | - | - | - |"
    compressed = run(["compress", source, "--data", data, "-o", folder / "artifact"], folder / "compress.log", timeout)
    endpoint = compare_endpoint(folder / "artifact") if (folder / "artifact").exists() else "-"
    pruned, reload = prune(source, data, folder, timeout)
    return f"| {name} | {checkpoint.task.name} | {agreement} | {compressed} | {endpoint} | {pruned} | {reload} |"


def compare(family: Family, source: Path, data: Path) -> float:
    """The largest difference of an output from transformers' own model and preprocessing, relative to the largest."""
    checkpoint = load_source(source)
    model = getattr(transformers, f"{family.config}{family.head}").from_pretrained(source).eval()
    worst = 0.0
    for value in read_samples(family, data):
        inputs = checkpoint.task.encode([checkpoint.task.parse(value)])
        with torch.inference_mode():
            found = next(
                iter(call(checkpoint.module, {key: torch.from_numpy(each) for key, each in inputs.items()}).values())
            )
            expected = answer(family, model, source, value)
        found, expected = found.float().squeeze(), expected.float().squeeze()
        worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
    return worst


def read_samples(family: Family, data: Path) -> list[Any]:
    """A few samples of the data."""
    if family.processor:
        return [path.read_bytes() for path in sorted(data.glob("*/*.png"))[:COMPARED]]
    return [line.rpartition(",")[0] for line in data.read_text(encoding="utf-8").splitlines()[1 : 1 + COMPARED]]


def answer(family: Family, model: Any, source: Path, value: Any) -> torch.Tensor:
    """What transformers answers: logits, those of the next token, or the mean of the hidden states."""
    if family.processor:
        processor = transformers.AutoImageProcessor.from_pretrained(source, backend="pil")
        logits: torch.Tensor = model(**processor(images=Image.open(io.BytesIO(value)), return_tensors="pt")).logits
        return logits
    tokens = transformers.AutoTokenizer.from_pretrained(source)(value, return_tensors="pt", truncation=True)
    taken = {key: each for key, each in tokens.items() if key != "token_type_ids" or takes_types(model)}
    outputs = model(**taken)
    if "logits" not in outputs:
        mean: torch.Tensor = outputs.last_hidden_state.mean(dim=1)
        return mean
    logits = outputs.logits
    return logits[:, -1] if logits.ndim == 3 else logits


def takes_types(model: Any) -> bool:
    """Whether a model tells the two texts of a pair apart."""
    return getattr(model.config, "type_vocab_size", 0) > 1


def run(arguments: list[Any], log: Path, timeout: int) -> str:
    """Run a command; says how it ended, with its last sentence where it did not do what was asked."""
    command = [sys.executable, "-m", "laconic", *map(str, arguments)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return "did not end in time"
    log.write_text(ended.stdout + ended.stderr, encoding="utf-8")
    if ended.returncode == DONE:
        return "done"
    said = " ".join(ended.stderr.strip().rpartition("laconic: ")[2].split())
    return f"{ {MISSED: 'missed', REFUSED: 'refused'}.get(ended.returncode, 'failed') }: {said[:160]}"


def compare_endpoint(path: Path) -> str:
    """Whether the server gives what the artifact gives when it is loaded."""
    artifact = Artifact.load(path)
    task = artifact.task()
    inputs = task.encode(task.examples(1))
    model = artifact.path / "model.onnx"
    try:
        with open_served(artifact, artifact.manifest.placement) as served:
            found = served.run(inputs)
        engine = make_runtime(artifact.manifest.placement)
        with engine.open(model, threads=1, compute=artifact.manifest.compute) as session:
            expected = session.run(inputs)
    except LaconicError as error:
        return f"failed: {error}"
    return "equal" if all(np.allclose(found[key], expected[key], atol=1e-4) for key in expected) else "differs"


def prune(source: Path, data: Path, folder: Path, timeout: int) -> tuple[str, str]:
    """Prune to half, and open the checkpoint that this writes."""
    said = ""
    for kind, stages in PRUNE.items():
        recipe, output = folder / f"{kind}.yaml", folder / kind
        recipe.write_text(f"stages:\n  - {stages}\n", encoding="utf-8")
        given = ["--recipe", recipe, "--to", "checkpoint", "--data", data, "--fidelity", "0", "-o", output]
        said = run(["compress", source, *given], folder / f"{kind}.log", timeout)
        if output.exists():
            load_source(output)
            return kind, "done"
    return said, "-"


if __name__ == "__main__":
    main()
