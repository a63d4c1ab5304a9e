"""Models of transformers that read waveforms: wav2vec 2.0 and its relatives."""

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from laconic.tasks.audio_preprocess import MINIMUM_FRAMES, AudioPreprocess

# At each call of WavLM, whose code in transformers gives torch masks of two types.
warnings.filterwarnings("ignore", message="Support for mismatched key_padding_mask")


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
        # In transformers the lengths become fractions and indices, which an engine that computes in BF16 rounds:
        # OpenVINO then wrote beyond its memory.
        masks = partial(mask_frames, *split_convolutions(model.config))
        for part in (model, model.base_model):
            part._get_feature_vector_attention_mask = masks

    def forward(self, input_values: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.model(input_values=input_values, attention_mask=attention_mask).logits
        if attention_mask is None or logits.ndim == 2:
            return logits
        frames = self.model._get_feature_vector_attention_mask(logits.shape[1], attention_mask)
        return logits.masked_fill(frames.unsqueeze(-1) == 0, 0.0)


Convolutions = tuple[tuple[int, int], ...]
"""Kernel and stride of each convolution that shortens a recording, in their order."""


def mask_frames(
    encoder: Convolutions, adapter: Convolutions, frames: int, attention_mask: Tensor, add_adapter: bool | None = None
) -> Tensor:
    """Return which frames of a batch are no padding, [batch, frames] bool, in whole numbers.

    encoder, adapter: the convolutions of both. attention_mask: [batch, samples]. add_adapter: whether the frames are
    those behind the adapter, by default if there is one.
    """
    lengths = attention_mask.sum(dim=-1)
    for kernel, stride in (*encoder, *(adapter if add_adapter is not False else ())):
        lengths = torch.div(lengths - kernel, stride, rounding_mode="trunc") + 1
    return torch.arange(frames, device=attention_mask.device) < lengths[:, None]


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
def ignores_padding(module: SpeechModel, preprocess: AudioPreprocess) -> bool:
    """Return whether padding behind a recording leaves its answer as it is. In some models convolutions or an average
    read the padding in spite of the mask."""
    module.eval()
    generator = torch.Generator().manual_seed(0)
    longest = preprocess.count_samples(4 * MINIMUM_FRAMES)
    for frames in range(2 * MINIMUM_FRAMES, 3 * MINIMUM_FRAMES):  # in some models an odd number leaves a rest
        length = preprocess.count_samples(frames)
        alone = torch.randn((1, length), generator=generator)
        expected = module(alone, torch.ones_like(alone, dtype=torch.int64))
        padded = torch.nn.functional.pad(alone, (0, longest - length))
        actual = module(padded, (torch.arange(longest) < length).to(torch.int64)[None])
        if expected.ndim == 3 and expected.shape[1] != frames:
            return False
        actual = actual[:, : expected.shape[1]]
        if (actual - expected).abs().max() > PADDING_ERROR * expected.abs().max():
            return False
    return True


def split_convolutions(config: Any) -> tuple[Convolutions, Convolutions]:
    """Return the convolutions of the feature encoder and of the adapter, from a config of transformers."""
    count = config.num_adapter_layers if getattr(config, "add_adapter", False) else 0
    adapter = tuple((1, config.adapter_stride) for _ in range(count))
    return tuple(zip(config.conv_kernel, config.conv_stride, strict=True)), adapter
