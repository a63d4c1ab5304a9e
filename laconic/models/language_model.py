"""Causal language models: the distributions of the next token after each of a text, with or without a cache of keys
and values; what training takes of them; and how they write."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, GenerationMixin, masking_utils
from transformers.cache_utils import CacheLayerMixin

from laconic.errors import SourceError
from laconic.models.decoder_cache import describe_logits, make_cache
from laconic.models.pretrained import WritingModel, is_close, quiet
from laconic.tasks.decoder_tensors import GROUPS, LOG_LIKELIHOODS, OUTPUTS, CacheShape
from laconic.tasks.generation_settings import LONGEST, UNSTATED_LENGTH, GenerationSettings, as_ids

if TYPE_CHECKING:
    from laconic.tasks.task import Task

SCALES = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
"""By the key of config.json, the power of its value that the logits are multiplied with: Cohere, Falcon-H1, Granite."""
FAULTS = (AttributeError, TypeError, ValueError, RuntimeError, LookupError, AssertionError)
"""What code of a model may make of a cache that it does not keep."""
CAP = "final_logit_softcapping"
"""The key of config.json with the bound c of logits, c tanh(logit / c): Gemma 2."""


class LanguageModel(WritingModel):
    """The distributions of the next token after tokens of a text, and the likeliest ones.

    input_ids, position_ids: tokens and their places in the text, [batch, seq] int64, padded on the right.
    attention_mask: 1 at tokens after which the distribution is wanted, [batch, seq] int64; nothing else depends on it,
    since no token sees what follows it. past: the keys and values of earlier tokens, [batch, 2 layers, heads, past,
    width] float32, key and value of each layer in turn. Without a past, or one of no tokens, no cache is made: models
    that keep something else, and layers of different heads, run as well.

    Returns `probabilities`, [batch, seq, groups] float32, summed over groups of tokens, zeros where they are not
    wanted; `tokens`, [batch, seq] int64; and `log_likelihoods` of the token that follows each, [batch, seq] float32.
    Training takes the hidden states of all tokens, the head and the cap instead.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        config = cast(Any, model).config.get_text_config()
        scales = {key: getattr(config, key, None) for key in SCALES}
        self.scale = math.prod(each ** SCALES[key] for key, each in scales.items() if isinstance(each, int | float))
        self.logit_cap: float | None = getattr(config, CAP, None)

    @property
    def head(self) -> nn.Module:
        """The layer from hidden states to logits."""
        model: Any = self.model
        head: nn.Module = model.get_output_embeddings()
        return head

    def hidden(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states of all tokens, [batch, seq, width], times the scale of the logits, where the model
        has one.

        position_ids: for packed rows, which hold several texts: counted from 0 within each, without a mask. No text
        attends to another.
        """
        packed = position_ids is not None or torch.compiler.is_compiling()
        model: Any = self.model
        with nullcontext() if packed else disable_packing_detection():
            answer = model.base_model(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
            )
        states: Tensor = answer.last_hidden_state
        return states if self.scale == 1 else states * self.scale

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        past: Tensor | None = None,
    ) -> dict[str, Tensor]:
        # In an export the size of the past is free, and asking for it would fix it.
        if past is None or (not torch.compiler.is_exporting() and past.shape[3] == 0):
            logits = self.compute_logits(self.hidden(input_ids))
        else:
            cache, model = make_cache(past), cast(Any, self.model)
            logits = model(input_ids=input_ids, position_ids=position_ids, past_key_values=cache, use_cache=True).logits
        return self.describe(logits, attention_mask, input_ids)

    def describe(self, logits: Tensor, attention_mask: Tensor, input_ids: Tensor) -> dict[str, Tensor]:
        """Describe logits, [batch, seq, vocabulary], by what is compared of them."""
        described = dict(zip(OUTPUTS, describe_logits(logits, attention_mask, GROUPS), strict=True))
        return described | {LOG_LIKELIHOODS: measure_log_likelihoods(logits, input_ids)}

    def compute_logits(self, states: Tensor) -> Tensor:
        """Return the logits of scaled hidden states, as `hidden` returns them: [batch, seq, vocabulary]."""
        return cap_logits(self.head(states), self.logit_cap)

    @torch.no_grad()
    def choose_next(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the likeliest token behind each text, [batch] int64, without a cache, as the model runs in training.
        attention_mask: 1 at the tokens of a text, [batch, seq] int64."""
        states = self.hidden(input_ids, attention_mask)
        last = (attention_mask.sum(dim=1) - 1).clamp(min=0)
        logits: Tensor = self.head(states.gather(1, last[:, None, None].expand(-1, 1, states.shape[2]))[:, 0])
        return logits.argmax(dim=-1)  # a cap changes no order

    @torch.no_grad()
    def compute_past(self, ids: Tensor) -> Tensor:
        """Compute the keys and values of tokens, as `past`. ids: [batch, seq] int64."""
        cache = self.model(input_ids=ids, past_key_values=DynamicCache(), use_cache=True).past_key_values
        return torch.stack([each for layer in cache.layers for each in (layer.keys, layer.values)], dim=1)

    @torch.inference_mode()
    def generate(self, source: Mapping[str, Tensor], generation: GenerationSettings) -> Tensor:
        """Return the greedy continuations of transformers, without the prompts: [batch, tokens] int64, padded on the
        right. source: `input_ids` and `attention_mask`, whose last 1 is the end of the prompt."""
        inputs = self.select_source(source, generation)
        with quiet():
            written: Tensor = GenerationMixin.generate(
                self.model, **inputs, num_beams=1, do_sample=False, use_cache=writes_with_cache(self.model),
                max_new_tokens=generation.max_new_tokens, min_new_tokens=generation.min_new_tokens,
                eos_token_id=list(generation.eos_token_id) or None, pad_token_id=generation.pad_token_id,
                repetition_penalty=1.0, no_repeat_ngram_size=0,
            )  # fmt: skip
        return written[:, inputs["input_ids"].shape[1] :]

    def select_source(self, source: Mapping[str, Tensor], generation: GenerationSettings) -> dict[str, Tensor]:
        """Return what transformers reads of prompts, with their ends side by side."""
        ids, mask = align_right(source["input_ids"], source["attention_mask"], generation.pad_token_id)
        return {"input_ids": ids, "attention_mask": mask}


def writes_with_cache(model: Any) -> bool:
    """Return whether transformers writes with the model's cache: not with one that does not know how many tokens it
    holds, as that of convolutions alone."""
    layers = DynamicCache(config=model.config).layers
    return not layers or model._is_stateful or any(isinstance(layer, CacheLayerMixin) for layer in layers)


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Return logits of any shape, kept between -cap and cap by a hyperbolic tangent; unchanged without a cap."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


@contextmanager
def disable_packing_detection() -> Iterator[None]:
    """Keep transformers from looking for packed sequences, several texts in a row, in the body.

    Without a mask it reads all positions on the device to find them, once a forward pass; on the meta device it assumes
    that there are some, and then builds a mask which costs memory that training does not need.
    """
    find = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find


def check_causal(module: LanguageModel, origin: Any) -> None:
    """Raise SourceError for a model with bidirectional attention, or one that changes its logits after the head in a
    way that `LanguageModel` does not know."""
    ids = torch.tensor([[0, 1, 2], [0, 1, 1]])
    with torch.no_grad():
        states = module.eval().hidden(ids)
        expected: Tensor = module.model(input_ids=ids, use_cache=False).logits
        logits = cap_logits(module.head(states), module.logit_cap)
    if not is_close(states[0, :2], states[1, :2]):
        raise SourceError(
            f"{origin} holds a {type(module.model).__name__} whose tokens see those that follow; expected a causal "
            f"model. Name another --task"
        )
    if not is_close(logits, expected):
        raise SourceError(
            f"{origin} holds a {type(module.model).__name__}, whose logits are more than its head makes of its hidden "
            f"states by a scale and a cap that config.json names ({', '.join((*SCALES, CAP))}). Build the model in a "
            f"function of your own, and give it with --builder"
        )


def measure_log_likelihoods(logits: Tensor, ids: Tensor) -> Tensor:
    """Measure the log-likelihood of the token that follows each one, 0 at the last: [batch, seq].

    logits: [batch, seq, vocabulary]. ids: [batch, seq] int64.
    """
    # Gathered at all places: of indices that are shorter than the logits OpenVINO makes an error.
    chosen = logits.gather(-1, functional.pad(ids[:, 1:], (0, 1)).unsqueeze(-1)).squeeze(-1)
    return functional.pad((chosen - logits.logsumexp(dim=-1))[:, :-1], (0, 1))


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


@torch.inference_mode()
def find_text_cache_shape(module: LanguageModel) -> CacheShape | None:
    """Find the shape of the cache of a causal language model, from two runs. None for a model that keeps something else
    than keys and values, or other shapes in its layers, or does not run with them."""
    ids = torch.zeros((2, 2), dtype=torch.int64)
    model: Any = module.model
    try:
        layers = model(input_ids=ids, use_cache=True).past_key_values.layers
        shapes = {tuple(each.shape) for layer in layers for each in (layer.keys, layer.values)}
        (shape,) = shapes
        rows, heads, tokens, width = shape
        module(ids, ids, ids + 2, torch.zeros(rows, 2 * len(layers), heads, tokens, width))
    except FAULTS:
        return None
    return (2 * len(layers), heads, width) if (rows, tokens) == ids.shape else None


def fit_cache(task: "Task", module: nn.Module) -> "Task":
    """Return the task of a module whose structure may have changed, with the cache that it has now."""
    if not isinstance(module, LanguageModel):
        return task
    return task.with_cache(find_text_cache_shape(module))


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
