"""Masked language models: for each text, the logits of its first masked token."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from laconic.errors import SourceError
from laconic.models.pretrained import is_close


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
