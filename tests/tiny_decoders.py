"""A decoder with a cache, of one layer, and what the masks of others do to it, as ONNX."""

import warnings
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor, nn

VOCABULARY, HEADS, WIDTH = 64, 2, 8


class GreedyWriter:
    """Writes by the logits after each token, which `predict` computes."""

    def predict(self, ids: list[int]) -> Tensor:
        """The logits after each token, [tokens, vocabulary]."""
        raise NotImplementedError

    def write_greedily(self, prompt: list[int], tokens: int) -> list[int]:
        """What follows a prompt."""
        ids = list(prompt)
        for _ in range(tokens):
            ids.append(int(self.predict(ids)[-1].argmax()))
        return ids[len(prompt) :]


class TinyDecoder(GreedyWriter, nn.Module):
    """window: of attention. has_bias: adds to the scores of earlier tokens. cap: of the scores. is_causal: whether
    tokens that follow are hidden. scaled: where the scores are scaled, before the product or behind it."""

    def __init__(
        self,
        *,
        window: int | None = None,
        has_bias: bool = False,
        cap: float | None = None,
        is_causal: bool = True,
        scales_scores: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.window, self.has_bias, self.cap = window, has_bias, cap
        self.is_causal, self.scales_scores = is_causal, scales_scores
        self.embed = nn.Embedding(VOCABULARY, HEADS * WIDTH)
        self.places = nn.Embedding(512, HEADS * WIDTH)
        self.read = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self.head = nn.Linear(HEADS * WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        x = self.embed(input_ids) + self.places(position_ids)
        batch, tokens, _ = x.shape
        parts = self.read(x).view(batch, tokens, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        keys, values = torch.cat([keys, parts[1]], 2), torch.cat([values, parts[2]], 2)
        factor = 4 * WIDTH**-0.5
        query = parts[0] if self.scales_scores else parts[0] * factor
        scores = query @ keys.transpose(2, 3)
        if self.scales_scores:
            scores = scores * factor
        if self.cap is not None:
            scores = self.cap * torch.tanh(scores / self.cap)
        distance = torch.arange(keys.shape[2]) - torch.arange(keys.shape[2])[-tokens:, None]
        hidden = distance > 0 if self.is_causal else distance > 10_000
        if self.window is not None:
            hidden = hidden | (distance <= -self.window)
        mask = torch.where(hidden, -10_000.0, distance * 0.1 if self.has_bias else distance * 0.0)
        written = torch.softmax(scores + mask, -1) @ values
        return self.head(x + written.transpose(1, 2).reshape(batch, tokens, -1)), keys, values

    def predict(self, ids: list[int]) -> Tensor:
        """The logits after each token, [tokens, vocabulary]."""
        empty = torch.zeros(1, HEADS, 0, WIDTH)
        with torch.no_grad():
            logits: Tensor = self(torch.tensor([ids]), torch.arange(len(ids))[None], empty, empty)[0]
        return logits[0]


def open_tiny_decoder(root: Path, **changes: Any) -> tuple[TinyDecoder, Path]:
    """A decoder and its file, made once in a run by whichever process asks first."""
    decoder = TinyDecoder(**changes).eval()
    name = "-".join(["tiny", *(f"{name}-{value}" for name, value in changes.items())])
    path = root / name / "model.onnx"
    with FileLock(root / f"{name}.lock"):
        if not path.exists():
            path.parent.mkdir()
            write_decoder(path, decoder)
    return decoder, path


def write_decoder(path: Path, decoder: TinyDecoder) -> Path:
    """Write a decoder as ONNX, with the inputs and outputs of a language model's graph."""
    batch, tokens, past = (torch.export.Dim(name) for name in ("batch", "tokens", "past"))
    sizes = {0: batch, 1: tokens}
    ids, places = (torch.zeros(2, 3, dtype=torch.int64) for _ in range(2))
    keys, values = (torch.zeros(2, HEADS, 4, WIDTH) for _ in range(2))
    uncached = torch._dynamo.config.patch(fake_tensor_cache_enabled=False)  # faster, as in the product
    with warnings.catch_warnings(), uncached:
        warnings.simplefilter("ignore")  # of the exporter, about itself
        program = torch.onnx.export(
            decoder,
            (ids, places, keys, values),
            input_names=["input_ids", "position_ids", "past.0", "past.1"],
            output_names=["logits", "present.0", "present.1"],
            dynamic_shapes=(sizes, sizes, {0: batch, 2: past}, {0: batch, 2: past}),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    program.save(path)
    return path
