"""Encoder-decoder models of transformers that write what is said in a recording: Whisper."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from laconic.models.encoder_decoder import EncoderDecoder, make_cache, select_settings
from laconic.models.pretrained import quiet
from laconic.tasks.generation_settings import GenerationSettings


class SpeechWriter(EncoderDecoder):
    """`EncoderDecoder` for a source of spectrograms: input_features, [batch, bands, frames] float32.

    Neither masks parts of the input (SpecAugment) nor skips layers (LayerDrop) in training: both draw random numbers
    that a resumed or a simulated step would not repeat.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        whole: Any = model
        whole.config.apply_spec_augment = False
        parts: Any = (whole.get_encoder(), whole.get_decoder())
        for part in parts:
            part.layerdrop = 0.0

    def forward(  # type: ignore[override]  # the source is another
        self, input_features: Tensor, decoder_input_ids: Tensor, decoder_attention_mask: Tensor, past: Tensor
    ) -> dict[str, Tensor]:
        given = {"input_features": input_features, "decoder_input_ids": decoder_input_ids}
        return self.describe(self.logits(make_cache(past), **given), decoder_attention_mask)

    @torch.inference_mode()
    def generate(self, source: Mapping[str, Tensor], generation: GenerationSettings) -> Tensor:
        """The greedy answers of transformers, with language and forced tokens, without the start token: [batch, tokens]
        int64, padded on the right."""
        model: Any = self.model
        encoded = model.get_encoder()(**source)
        written = torch.full((len(encoded[0]), 1), generation.decoder_start_token_id)
        if generation.languages:
            languages = torch.tensor(generation.languages)
            logits = model(encoder_outputs=encoded, decoder_input_ids=written, use_cache=False).logits[:, -1]
            written = torch.cat([written, languages[logits[:, languages].argmax(dim=1, keepdim=True)]], dim=1)
        forced = torch.tensor(generation.forced_decoder_ids, dtype=torch.int64).expand(len(written), -1)
        written = torch.cat([written, forced], dim=1)
        given = select_settings(generation) | {"max_new_tokens": generation.max_new_tokens - generation.begin}
        with quiet():  # the method of Whisper would cut recordings into parts, and make the prompt itself
            found: Tensor = GenerationMixin.generate(
                model, encoder_outputs=encoded, decoder_input_ids=written, num_beams=1, do_sample=False, use_cache=True,
                **given,
            )  # fmt: skip
        return found[:, 1:]
