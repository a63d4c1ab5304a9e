"""Models of transformers that read waveforms: wav2vec 2.0 and its relatives."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

# At each call of WavLM, whose code in transformers gives torch masks of two types.
warnings.filterwarnings("ignore", message="Support for mismatched key_padding_mask")

MINIMUM_FRAMES = 4
"""Frames that the shortest recording has. One alone leaves nothing to attend to, and SEW halves their number."""


class SpeechModel(nn.Module):
    """input_values [batch, samples] float32 and, for models with a mask, attention_mask [batch, samples] int64, to the
    logits of classes [batch, classes], or of characters [batch, frames, tokens]; there zeros at frames of padding.

    Neither masks parts of the input (SpecAugment) nor skips layers (LayerDrop) in training: both draw random numbers
    that a resumed or a simulated step would not repeat.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        model.config.apply_spec_augment = False
        model.config.layerdrop = 0.0
        self.model = model
        merge_weight_norms(model)

    def forward(self, input_values: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.model(input_values=input_values, attention_mask=attention_mask).logits
        if attention_mask is None or logits.ndim == 2:
            return logits
        base = self.model.base_model
        frames = base._get_feature_vector_attention_mask(logits.shape[1], attention_mask)
        return logits.masked_fill(frames.unsqueeze(-1) == 0, 0.0)


def merge_weight_norms(module: nn.Module) -> None:
    """Make plain weights of those that are kept as direction and length, as every stage expects them."""
    for part in list(module.modules()):
        if parametrize.is_parametrized(part):
            for name in list(part.parametrizations):  # type: ignore[arg-type]
                with torch.no_grad():
                    parametrize.remove_parametrizations(part, name)


PADDING_ERROR = 1e-4
"""The largest change of an output, relative to the largest output, that padding may make. Rounding alone makes 1e-6."""


@torch.inference_mode()
def ignores_padding(module: SpeechModel, shortest: int) -> bool:
    """Whether padding behind a recording leaves its answer as it is. In some models convolutions or an average read
    the padding in spite of the mask. shortest: samples of the shortest recording."""
    module.eval()
    generator = torch.Generator().manual_seed(0)
    longest = 4 * shortest
    for length in range(2 * shortest, 3 * shortest, shortest // MINIMUM_FRAMES):  # of even and of odd numbers of frames
        alone = torch.randn((1, length), generator=generator)
        wanted = module(alone, torch.ones_like(alone, dtype=torch.int64))
        padded = torch.nn.functional.pad(alone, (0, longest - length))
        found = module(padded, (torch.arange(longest) < length).to(torch.int64)[None])
        found = found[:, : wanted.shape[1]]
        if (found - wanted).abs().max() > PADDING_ERROR * wanted.abs().max():
            return False
    return True


def count_shortest(config: Any) -> int:
    """The samples that give MINIMUM_FRAMES frames after the strided convolutions of a config."""
    samples = MINIMUM_FRAMES
    for kernel, stride in zip(reversed(config.conv_kernel), reversed(config.conv_stride), strict=True):
        samples = (samples - 1) * stride + kernel
    return samples
