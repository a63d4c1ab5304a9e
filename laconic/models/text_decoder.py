"""Causal language models that write: the next token after each of a text, with a cache of keys and values."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, GenerationMixin

from laconic.errors import SourceError
from laconic.models.decoder_cache import describe_logits, make_cache
from laconic.models.language_model import LanguageModel
from laconic.models.pretrained import WritingModel, quiet
from laconic.tasks.decoder_tensors import GROUPS, LOG_LIKELIHOODS, OUTPUTS, CacheShape
from laconic.tasks.generation_settings import LONGEST, UNSTATED_LENGTH, GenerationSettings, as_ids


class TextDecoder(LanguageModel, WritingModel):
    """The distributions of the next token after tokens of a text, and the likeliest ones.

    input_ids, position_ids: tokens and their places in the text, [batch, seq] int64, padded on the right.
    attention_mask: 1 at tokens after which the distribution is wanted, [batch, seq] int64; nothing else depends on it,
    since no token sees what follows it. past: the keys and values of earlier tokens, [batch, 2 layers, heads, past,
    width] float32, key and value of each layer in turn.

    Returns `probabilities`, [batch, seq, groups] float32, summed over groups of tokens, zeros where they are not
    wanted; `tokens`, [batch, seq] int64; and `log_likelihoods` of the token that follows each, [batch, seq] float32.
    """

    def forward(  # type: ignore[override]  # it returns the distributions of more tokens than the last
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: Tensor
    ) -> dict[str, Tensor]:
        answer = self.model(
            input_ids=input_ids, position_ids=position_ids, past_key_values=make_cache(past), use_cache=True
        )
        described = dict(zip(OUTPUTS, describe_logits(answer.logits, attention_mask, GROUPS), strict=True))
        return described | {LOG_LIKELIHOODS: measure_log_likelihoods(answer.logits, input_ids)}

    @torch.no_grad()
    def compute_past(self, ids: Tensor) -> Tensor:
        """Compute the keys and values of tokens, as `past`. ids: [batch, seq] int64."""
        cache = self.model(input_ids=ids, past_key_values=DynamicCache(), use_cache=True).past_key_values
        return torch.stack([each for layer in cache.layers for each in (layer.keys, layer.values)], dim=1)

    @torch.inference_mode()
    def generate(self, source: Mapping[str, Tensor], generation: GenerationSettings) -> Tensor:
        """Return the greedy continuations of transformers, without the prompts: [batch, tokens] int64, padded on the
        right. source: `input_ids` and `attention_mask`, whose last 1 is the end of the prompt."""
        ids, mask = align_right(source["input_ids"], source["attention_mask"], generation.pad_token_id)
        with quiet():
            written: Tensor = GenerationMixin.generate(
                self.model, input_ids=ids, attention_mask=mask, num_beams=1, do_sample=False, use_cache=True,
                max_new_tokens=generation.max_new_tokens, min_new_tokens=generation.min_new_tokens,
                eos_token_id=list(generation.eos_token_id) or None, pad_token_id=generation.pad_token_id,
                repetition_penalty=1.0, no_repeat_ngram_size=0,
            )  # fmt: skip
        return written[:, ids.shape[1] :]


def measure_log_likelihoods(logits: Tensor, ids: Tensor) -> Tensor:
    """Measure the log-likelihood of the token that follows each one, 0 at the last: [batch, seq].

    logits: [batch, seq, vocabulary]. ids: [batch, seq] int64.
    """
    chosen = logits[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    return functional.pad(chosen - logits[:, :-1].logsumexp(dim=-1), (0, 1))


def align_right(ids: Tensor, mask: Tensor, pad_id: int) -> tuple[Tensor, Tensor]:
    """Move prompts that are padded on the right to the right end of their rows, and make the mask that tells their
    padding. mask: its last 1 is the end of the prompt. All: [batch, seq] int64."""
    width = ids.shape[1]
    lengths = [width - int(row.flip(0).argmax()) for row in mask]
    aligned, told = torch.full_like(ids, pad_id), torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        aligned[row, width - length :], told[row, width - length :] = ids[row, :length], 1
    spare = width - max(lengths)
    return aligned[:, spare:], told[:, spare:]


def find_text_cache_shape(model: Any, token: int, origin: Path) -> CacheShape:
    """Find the shape of the cache of a causal language model, from one run. token: one that the model knows.

    Raises SourceError for a model that keeps something else than keys and values, or other shapes in its layers.
    """
    ids = torch.tensor([[token, token]])
    try:
        with torch.inference_mode():
            layers = model(input_ids=ids, use_cache=True).past_key_values.layers
        shapes = {tuple(each.shape) for layer in layers for each in (layer.keys, layer.values)}
    except Exception as error:  # whatever code of a model makes of it
        raise SourceError(
            f"{origin} holds a {type(model).__name__}, which does not run with a cache of keys and values: "
            f"{type(error).__name__}, {' '.join(str(error).split())[:200]}. Try --task causal-lm, which predicts one "
            f"token"
        ) from error
    if len(shapes) != 1 or len(shape := next(iter(shapes))) != 4 or shape[2] != ids.shape[1]:
        raise SourceError(
            f"{origin} holds a {type(model).__name__}, whose layers keep tensors of the shapes {sorted(shapes)}; "
            f"expected [batch, heads, tokens, width] in each. Try --task causal-lm, which predicts one token"
        )
    return 2 * len(layers), shape[1], shape[3]


def read_text_generation(
    model: Any, pad_id: int, start_id: int, end_id: int | None, context: int
) -> GenerationSettings:
    """Read the tokens that end an answer, and the most that it may have, of a causal language model. context: the most
    tokens that it takes.

    How to sample is for each request to say, so that generation_config.json's temperature and penalties are left out.
    """
    settings = model.generation_config
    ends = as_ids(settings.eos_token_id) or as_ids(model.config.eos_token_id)
    most = settings.max_new_tokens or UNSTATED_LENGTH
    return GenerationSettings(
        decoder_start_token_id=start_id,
        eos_token_id=tuple(dict.fromkeys((*ends, *as_ids(end_id)))),
        pad_token_id=pad_id,
        max_new_tokens=max(1, min(int(most), LONGEST)),
        max_length=context,
    )
