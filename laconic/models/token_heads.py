"""Models of transformers with an answer for each token of a text."""

import torch
from torch import Tensor, nn


class TokenClassifier(nn.Module):
    """input_ids, attention_mask and, for models of pairs, token_type_ids, [batch, seq] int64, to the logits
    [batch, seq, classes]; zeros at the padding, so that the answer to a text does not depend on its batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask, **types).logits
        return clear_padding(logits, attention_mask)


class QuestionAnswerer(nn.Module):
    """As TokenClassifier, to [batch, seq, 2]: the logits of the first and of the last token of the answer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        answer = self.model(input_ids=input_ids, attention_mask=attention_mask, **types)
        return clear_padding(torch.stack([answer.start_logits, answer.end_logits], dim=-1), attention_mask)


def clear_padding(logits: Tensor, attention_mask: Tensor) -> Tensor:
    """The logits with zeros at the padding. logits: [batch, seq, outputs]."""
    return logits.masked_fill(attention_mask.unsqueeze(-1) == 0, 0.0)
