"""What compression costs a language model: perplexity, and the distributions of the next token, on texts that chose
nothing.

    python benchmarks/perplexity.py CHECKPOINT ARTIFACT... [--unlike texts.jsonl] [--texts 150] [--tokens 256]

The texts are docstrings of the standard library, several of one package joined, without those in the file `--unlike`,
which the artifacts were made with. Each is read whole, by the original in FP32 and BF16 (transformers), and by each
artifact in its own engine. Perplexity is the exponential of the mean loss of a token; its ratio to the original's in
FP32 has a 95 % interval, by resampling texts. The Kullback-Leibler divergence from the original's distribution is over
all tokens of the vocabulary, in nats. A null answer, the distribution of tokens over all texts, has a row too.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import cast

import numpy as np
import torch
from inputs import DOCSTRINGS
from results import Results, make_parser
from tokenizers import Tokenizer

from laconic.arrays import Array
from laconic.artifacts.artifact import Artifact
from laconic.artifacts.manifest import MODEL
from laconic.models.checkpoint import WEIGHTS
from laconic.models.language_model import LanguageModel
from laconic.models.source_loading import load_source
from laconic.runtimes.decoder_file import LOGITS
from laconic.runtimes.decoder_session import DecoderSession

RESAMPLES = 1000
JOINED = 10
"""Docstrings in a text."""
FIGURES = ("perplexity", "ratio (95 %)", "divergence, nats", "likeliest token the same")
Distributions = Callable[[Array], Array]
"""From the tokens of a text, [tokens], to the logarithms of the distributions behind each, [tokens, vocabulary]."""


def main() -> None:
    """Measure, and print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("artifacts", type=Path, nargs="*")
    parser.add_argument("--unlike", type=Path, default=None, help="a .jsonl file, whose texts are left out")
    parser.add_argument("--texts", type=int, default=150, help="at most so many")
    parser.add_argument("--tokens", type=int, default=256, help="at most so many of a text")
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    tokenizer = Tokenizer.from_file(str(arguments.checkpoint / "tokenizer.json"))
    tokenizer.no_truncation()
    texts = [
        np.array(tokenizer.encode(text).ids[: arguments.tokens], np.int64)
        for text in join_docstrings(arguments.unlike, arguments.texts)
    ]
    texts = [text for text in texts if len(text) > 1]
    original = open_original(arguments.checkpoint, torch.float32)
    expected = [original(text) for text in texts]
    models: dict[str, Distributions] = {
        "original, FP32": original,
        "original, BF16": open_original(arguments.checkpoint, torch.bfloat16),
        **{str(path): open_artifact(path) for path in arguments.artifacts},
        "null: unigram": make_unigram(texts, expected[0].shape[1]),
    }
    judged = f"{len(texts)} texts, {sum(map(len, texts)) - len(texts):,} tokens"
    results.begin("perplexity", [judged, "MB", *FIGURES])
    for name, distributions in models.items():
        size = f"{measure_size(Path(name)) / 1e6:.3g}" if Path(name).is_dir() else ""
        quality = describe_quality(expected, [distributions(text) for text in texts], texts)
        results.add("perplexity", [Path(name).name, size, *quality])


def measure_size(path: Path) -> int:
    """Measure the bytes of a model's weights with its graph, or alone where it is a checkpoint."""
    return sum((path / name).stat().st_size for name in (MODEL, WEIGHTS) if (path / name).is_file())


def join_docstrings(unlike: Path | None, most: int) -> list[str]:
    """Return docstrings, those of a package joined, without those of a file."""
    known = set() if unlike is None else {row["text"] for row in read_rows(unlike)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "docstrings.jsonl"
        subprocess.run([sys.executable, DOCSTRINGS, path], check=True, stdout=subprocess.DEVNULL)
        rows = [row for row in read_rows(path) if row["text"] not in known]
    texts = []
    for _, group in groupby(rows, key=lambda row: row["label"]):
        lines = [row["text"] for row in group]
        texts += ["\n".join(lines[start : start + JOINED]) for start in range(0, len(lines), JOINED)]
    return texts[:: max(1, len(texts) // most)][:most]


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read a file of rows."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def open_original(checkpoint: Path, dtype: torch.dtype) -> Distributions:
    """Open the original in an arithmetic."""
    module = load_source(checkpoint, task="text-generation").module
    assert isinstance(module, LanguageModel)
    model = module.model.eval()
    for parameter in model.parameters():  # not the frequencies of positions, which transformers keeps in FP32, too
        parameter.data = parameter.data.to(dtype)

    @torch.inference_mode()
    def read(text: Array) -> Array:
        logits = model(torch.from_numpy(text)[None]).logits[0].float()
        return cast(Array, logits.log_softmax(dim=-1).numpy())

    return read


def open_artifact(path: Path) -> Distributions:
    """Open an artifact in its own engine."""
    session = Artifact.load(path).open()
    if not isinstance(session, DecoderSession):
        sys.exit(f"{path} is no language model that writes")

    def read(text: Array) -> Array:
        places = np.arange(len(text), dtype=np.int64)[None]
        logits = session.decode(text[None], places, session.make_empty(1))[LOGITS][0]
        return torch.from_numpy(logits).log_softmax(dim=-1).numpy()

    return read


def make_unigram(texts: Sequence[Array], vocabulary: int) -> Distributions:
    """Make the model that gives each token its share of all texts, whatever is before it."""
    counts = np.bincount(np.concatenate(texts), minlength=vocabulary) + 1e-3
    row = np.log(counts / counts.sum()).astype(np.float32)
    return lambda text: np.broadcast_to(row, (len(text), vocabulary))


def describe_quality(expected: list[Array], answers: list[Array], texts: list[Array]) -> tuple[str, ...]:
    """Describe a model's distributions beside the original's, as cells of the table."""
    counts = np.array([len(text) - 1 for text in texts])
    losses, base = sum_losses(answers, texts), sum_losses(expected, texts)
    divergence, same = compare(expected, answers)
    low, high = find_ratio_interval(losses - base, counts)
    ratio = np.exp((losses - base).sum() / counts.sum())
    perplexity = np.exp(losses.sum() / counts.sum())
    return f"{perplexity:.3f}", f"{ratio:.4f} ({low:.4f} to {high:.4f})", f"{divergence:.5f}", f"{same:.4f}"


def sum_losses(answers: Sequence[Array], texts: Sequence[Array]) -> Array:
    """Return the loss of each text: minus the logarithms of the probabilities of its tokens behind the first."""
    pairs = zip(answers, texts, strict=True)
    return np.array([-answer[np.arange(len(text) - 1), text[1:]].sum(dtype=np.float64) for answer, text in pairs])


def compare(expected: Sequence[Array], answers: Sequence[Array]) -> tuple[float, float]:
    """Return the mean divergence of the answers from what is expected, and the share of likeliest tokens that are the
    same, over all tokens."""
    divergences, same = [], []
    for ours, theirs in zip(expected, answers, strict=True):
        divergences.append((np.exp(ours) * (ours - theirs)).sum(axis=-1))
        same.append(ours.argmax(axis=-1) == theirs.argmax(axis=-1))
    return float(np.concatenate(divergences).mean()), float(np.concatenate(same).mean())


def find_ratio_interval(changes: Array, counts: Array) -> tuple[float, float]:
    """Return the 95 % interval of a ratio of perplexities, by resampling texts. changes: of the loss of each text.
    counts: its tokens."""
    rows = np.random.default_rng(0).integers(0, len(counts), (RESAMPLES, len(counts)))
    low, high = np.quantile(np.exp(changes[rows].sum(axis=1) / counts[rows].sum(axis=1)), [0.025, 0.975])
    return float(low), float(high)


if __name__ == "__main__":
    main()
