"""What a cache in few bits costs a language model over long texts: perplexity, and the distributions of the next token.

    python benchmarks/long_caches.py CHECKPOINT [--tokens 8192] [--texts 1] [--keys4]

The texts are of the language reference that comes with Python (`pydoc_data`). transformers reads each in FP32, in
pieces, with keys and values that are rounded before they enter the cache as `int8_kv_cache` and `int4_value_cache`
round them in an artifact's graph; and once in float. With --keys4 also with keys in 4 bits, in groups of 32 as values.
Perplexity, its ratio to that with a cache in float, the divergence in nats and the share of tokens whose likeliest one
is the same are printed after each piece, over all tokens so far.
"""

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from results import Results, make_parser
from tokenizers import Tokenizer
from torch import Tensor
from transformers import DynamicCache

from laconic.models.source_loading import load_source
from laconic.runtimes.decoder_file import find_value_group

PIECE = 512
"""Tokens that are read at once."""
CACHES = {"INT8": (8, 8), "INT8 keys, INT4 values": (8, 4)}
"""Bits of keys and of values."""


class RoundedCache(DynamicCache):  # type: ignore[misc]
    """A cache that rounds what it is given. bits: of keys and of values."""

    def __init__(self, bits: tuple[int, int]) -> None:
        super().__init__()
        self.bits = bits

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        key, value = (round_heads(*pair) for pair in zip((key_states, value_states), self.bits, strict=True))
        rounded: tuple[Tensor, Tensor] = super().update(key, value, *args, **kwargs)
        return rounded


def round_heads(numbers: Tensor, bits: int) -> Tensor:
    """Round heads, [..., width], to levels between the least and the largest number; in 4 bits of each group."""
    width = numbers.shape[-1]
    parts = numbers.reshape(*numbers.shape[:-1], -1, find_value_group(width) if bits == 4 else width)
    low, high = parts.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-9)
    rounded: Tensor = ((parts - low) / scale).round() * scale + low
    return rounded.reshape(numbers.shape)


@torch.inference_mode()
def main() -> None:
    """Measure, and print the figures."""
    parser = make_parser(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--texts", type=int, default=1)
    parser.add_argument("--keys4", action="store_true")
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    caches = CACHES | ({"INT4": (4, 4)} if arguments.keys4 else {})
    tokenizer = Tokenizer.from_file(str(arguments.checkpoint / "tokenizer.json"))
    tokenizer.no_truncation()
    ids = torch.tensor(tokenizer.encode("\n".join(text for _, text in sorted(topics.items()))).ids)
    model = load_source(arguments.checkpoint, task="text-generation").module.model
    count, sums = 0, {name: torch.zeros(4, dtype=torch.float64) for name in caches}
    for number in range(arguments.texts):
        text = ids[number * arguments.tokens : (number + 1) * arguments.tokens][None]
        states: dict[str, Any] = {"float": DynamicCache()} | {name: RoundedCache(caches[name]) for name in caches}
        for start in range(0, text.shape[1] - 1, PIECE):
            piece, labels = text[:, start : start + PIECE], text[0, start + 1 : start + 1 + PIECE]
            scores = {name: read(model, piece, cache)[: len(labels)] for name, cache in states.items()}
            for name in caches:
                sums[name] += compare(scores["float"], scores[name], labels)
            count += len(labels)
            print(f"text {number + 1}, {start + len(labels)} tokens: ", end="")
            print("; ".join(f"{name}: {', '.join(describe(sums[name] / count))}" for name in caches), flush=True)
    head = [f"{count:,} tokens", "perplexity", "ratio", "divergence, nats", "likeliest token the same"]
    results.table("caches", head, [[name, *describe(sums[name] / count)] for name in caches])


def read(model: Any, piece: Tensor, cache: DynamicCache) -> Tensor:
    """Read a piece, [1, tokens], behind what the cache holds; return log-probabilities, [tokens, vocabulary]."""
    return torch.log_softmax(model(input_ids=piece, past_key_values=cache).logits[0].float(), dim=-1)


def compare(expected: Tensor, scores: Tensor, labels: Tensor) -> Tensor:
    """Sum over tokens: the divergence, whether the likeliest token is the same, and the loss of both."""
    losses = [-each.gather(1, labels[:, None]).double().sum() for each in (expected, scores)]
    divergence = (expected.exp() * (expected - scores)).sum(dim=1).double().sum()
    same = (expected.argmax(dim=1) == scores.argmax(dim=1)).double().sum()
    return torch.stack([divergence, same, *losses])


def describe(means: Tensor) -> list[str]:
    """Describe the means over tokens: perplexity, its ratio to that with a cache in float, divergence, agreement."""
    divergence, same = means[:2].tolist()
    ratio = (means[3] - means[2]).exp().item()
    return [f"{means[3].exp().item():.3f}", f"{ratio:.4f}", f"{divergence:.5f}", f"{same:.4f}"]


if __name__ == "__main__":
    main()
