"""Causal language models: for each text, the logits of the token that follows it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import masking_utils

from laconic.errors import SourceError

CLOSE = 1e-4
"""The largest difference between two computations of the same values, relative to the largest value."""
SCALES = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
"""By the key of config.json, the power of its value that the logits are multiplied with: Cohere, Falcon-H1, Granite."""
CAP = "final_logit_softcapping"
"""The key of config.json with the bound c of logits, c tanh(logit / c): Gemma 2."""


class LanguageModel(nn.Module):
    """input_ids and attention_mask, [batch, seq] int64, padded on the right, to the next token's logits [batch, vocab].

    Training takes the hidden states of all tokens, the head and the cap instead.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        config: Any = model.config
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

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.hidden(input_ids, attention_mask)
        last = (attention_mask.sum(dim=1) - 1).clamp(min=0)
        logits: Tensor = self.head(states.gather(1, last[:, None, None].expand(-1, 1, states.shape[2]))[:, 0])
        return cap_logits(logits, self.logit_cap)


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


def is_close(actual: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are equal up to the rounding of their sums."""
    return torch.allclose(actual, expected, atol=CLOSE * float(expected.abs().max()), rtol=0)


class MaskedLanguageModel(nn.Module):
    """input_ids, attention_mask and, for models of pairs, token_type_ids, [batch, seq] int64, to the logits of the
    first masked token, [batch, vocab].

    The head runs at that position alone: at all of them its logits would be the largest tensor by far.
    """

    def __init__(self, model: nn.Module, mask_id: int) -> None:
        super().__init__()
        self.model = model
        self.mask_id = mask_id

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        model: Any = self.model
        position = (input_ids == self.mask_id).int().argmax(dim=1)
        with keep_position(model.base_model, position):
            logits: Tensor = model(input_ids=input_ids, attention_mask=attention_mask, **types).logits
        return logits[:, 0]


@contextmanager
def keep_position(encoder: nn.Module, position: Tensor) -> Iterator[None]:
    """Let an encoder return the last hidden state at one position of each row alone, in the body. position: [batch]."""

    def gather(module: nn.Module, arguments: Any, output: Any) -> Any:
        states = output.last_hidden_state
        index = position[:, None, None].expand(-1, 1, states.shape[2])
        output.last_hidden_state = states.gather(1, index)
        return output

    hook = encoder.register_forward_hook(gather)
    try:
        yield
    finally:
        hook.remove()


def check_masked(module: MaskedLanguageModel, origin: Any) -> None:
    """Raise SourceError for a model whose head looks at more than one position."""
    ids = torch.tensor([[1, 2, module.mask_id, 3], [module.mask_id, 2, 1, 3]])
    mask = torch.ones_like(ids)
    with torch.no_grad():
        logits = module.eval()(ids, mask)
        whole: Tensor = module.model(input_ids=ids, attention_mask=mask).logits
    if not is_close(logits, torch.stack([whole[0, 2], whole[1, 0]])):
        raise SourceError(
            f"{origin} holds a {type(module.model).__name__} whose logits depend on the hidden states of other tokens; "
            f"expected a head for each token alone. Build the model in a function of your own, and give it with "
            f"--builder"
        )
