"""Classifiers of transformers, as modules that take and give plain tensors."""

from torch import Tensor, nn


class TextClassifier(nn.Module):
    """input_ids, attention_mask and, for models of pairs, token_type_ids, [batch, seq] int64, to [batch, classes]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, **types).logits
        return logits


class ImageClassifier(nn.Module):
    """pixel_values, [batch, channels, height, width] float32, to [batch, classes]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=pixel_values).logits
        return logits
