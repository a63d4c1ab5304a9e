"""Encoders of images, and models of two towers: one for texts and one for images, whose vectors share a space."""

from typing import Any

import torch
from torch import Tensor, nn

from laconic.models.pretrained import WrappedModel

TEXT_PARTS = ("text",)
IMAGE_PARTS = ("vision", "visual")
"""How the names of the parts of either tower begin, as CLIP, SigLIP and their relatives name them."""


class ImageEmbedder(WrappedModel):
    """pixel_values, [batch, channels, height, width] float32, to [batch, features]: the encoder's pooled output, or the
    last hidden state of its first token where it has no pooler."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        answer = self.model(pixel_values=pixel_values)
        pooled = getattr(answer, "pooler_output", None)
        vector: Tensor = answer.last_hidden_state[:, 0] if pooled is None else pooled
        return vector.flatten(1)


class ImageTower(nn.Module):
    """pixel_values, [batch, channels, height, width] float32, to [batch, features] in the space of both towers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = keep_tower(model, drop=TEXT_PARTS)

    def forward(self, pixel_values: Tensor) -> Tensor:
        model: Any = self.model
        vector: Tensor = model.get_image_features(pixel_values=pixel_values).pooler_output
        return vector


class TextTower(nn.Module):
    """input_ids and attention_mask, [batch, seq] int64, to [batch, features] in the space of both towers.

    Without a mask where the model was trained on texts of one length, and reads the last token whatever it is (SigLIP).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = keep_tower(model, drop=IMAGE_PARTS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        model: Any = self.model
        vector: Tensor = model.get_text_features(input_ids=input_ids, attention_mask=attention_mask).pooler_output
        return vector


def has_towers(model: nn.Module) -> bool:
    """Return whether a model of transformers has one tower for texts and one for images."""
    return hasattr(model, "get_text_features") and hasattr(model, "get_image_features")


def keep_tower(model: nn.Module, *, drop: tuple[str, ...]) -> nn.Module:
    """Remove from a model the parts of the other tower, and what compares the vectors of both."""
    for name in [name for name, _ in model.named_children() if name.startswith(drop)]:
        delattr(model, name)
    for name, _ in list(model.named_parameters(recurse=False)):
        delattr(model, name)
    return model


def ignores_padding(tower: TextTower, length: int, pad_id: int) -> bool:
    """Return whether a text's vector is the same beside a longer one: padded, with the padding masked. length: of a
    text."""
    ids = torch.arange(1, length + 1)[None]
    padded = torch.cat([ids, torch.full_like(ids[:, :1], pad_id)], dim=1)
    mask = torch.ones_like(padded)
    mask[:, -1] = 0
    with torch.no_grad():
        alone, beside = tower(ids, torch.ones_like(ids)), tower(padded, mask)
    return torch.allclose(alone, beside, atol=1e-4 * float(alone.abs().max()), rtol=0)
