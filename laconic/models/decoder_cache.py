"""The cache of a decoder in transformers, and what is compared of its logits."""

from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def make_cache(past: Tensor) -> DynamicCache:
    """Make the cache of transformers that holds these keys and values of self-attention. past: [batch, 2 layers, heads,
    past, width], key and value of each layer in turn."""
    cache = DynamicCache()
    for index in range(0, past.shape[1], 2):
        layer = DynamicLayer()
        layer.keys, layer.values = past.select(1, index), past.select(1, index + 1)
        layer.dtype, layer.device, layer.is_initialized = past.dtype, past.device, True
        cache.layers.append(layer)
    return cache


def describe_logits(logits: Tensor, mask: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return the distributions of the token after each, summed over groups of tokens by their id modulo `groups` where
    there are more, [batch, tokens, groups]; and the likeliest tokens, [batch, tokens] int64.

    logits: [batch, tokens, vocabulary]. mask: 1 where the distribution is wanted, [batch, tokens] int64; it is zeros
    elsewhere.
    """
    probabilities = logits.softmax(dim=-1)
    if probabilities.shape[-1] > groups:
        spare = -probabilities.shape[-1] % groups
        shape = (*probabilities.shape[:2], -1, groups)
        probabilities = functional.pad(probabilities, (0, spare)).reshape(shape).sum(dim=-2)
    wanted = mask.unsqueeze(-1).to(probabilities.dtype)
    return probabilities * wanted, logits.argmax(dim=-1)
