"""Vision-language models of transformers (LLaVA): a tower of images, and a language model that reads texts with one."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from laconic.errors import SourceError
from laconic.models.decoder_cache import make_cache
from laconic.models.language_model import LanguageModel, align_right
from laconic.tasks.decoder_tensors import IMAGE_FEATURES, find_compared_patches
from laconic.tasks.generation_settings import GenerationSettings

KINDS = ("llava",)
"""The `model_type` of models whose images have one size, and whose tokens see those before them alone."""


class VisionLanguageModel(LanguageModel):
    """A language model whose texts have an image in them (Liu et al., Visual Instruction Tuning, 2023).

    input_ids: as of `LanguageModel`; an id below 0 is a patch of the row's image, -1 the first one. pixel_values:
    [batch, channels, height, width] float32; None for texts alone. The rest as of `LanguageModel`.

    Returns what `LanguageModel` does, and `image_features`, what the tower and its projector make of some patches:
    [batch, patches, width] float32. Training reads texts alone.
    """

    def __init__(self, model: Any) -> None:
        if model.config.model_type not in KINDS:
            raise SourceError(
                f"a vision-language model of the type {model.config.model_type!r} is not supported; expected "
                f"{' or '.join(KINDS)}"
            )
        super().__init__(model)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        past: Tensor | None = None,
        pixel_values: Tensor | None = None,
    ) -> dict[str, Tensor]:
        if pixel_values is None:
            return super().forward(input_ids, attention_mask, position_ids, past)
        features = self.encode_images(pixel_values)
        options: dict[str, Any] = {"use_cache": False}
        if past is not None and (torch.compiler.is_exporting() or past.shape[3]):
            options = {"position_ids": position_ids, "past_key_values": make_cache(past), "use_cache": True}
        body = cast(Any, self.model).base_model.language_model
        states = body(inputs_embeds=self.embed(input_ids, features), **options).last_hidden_state
        logits = self.compute_logits(states if self.scale == 1 else states * self.scale)
        compared = features[:, find_compared_patches(features.shape[1])]
        return self.describe(logits, attention_mask, input_ids.clamp(min=0)) | {IMAGE_FEATURES: compared}

    def encode_images(self, pixel_values: Tensor) -> Tensor:
        """Encode images: [batch, patches, width]. As `get_image_features` of transformers, which makes a list of the
        images of a batch, so that a graph would hold their number."""
        model, config = cast(Any, self.model).base_model, cast(Any, self.model).config
        states = model.vision_tower(pixel_values, output_hidden_states=True).hidden_states
        layers = config.vision_feature_layer
        chosen = [states[layer] for layer in ([layers] if isinstance(layers, int) else layers)]
        if config.vision_feature_select_strategy == "default":  # without the token of the class
            chosen = [each[:, 1:] for each in chosen]
        features: Tensor = model.multi_modal_projector(torch.cat(chosen, dim=-1))
        return features

    def embed(self, input_ids: Tensor, features: Tensor) -> Tensor:
        """Embed tokens, and patches of images: [batch, seq, width]. features: [batch, patches, width]."""
        tokens = cast(Any, self.model).get_input_embeddings()(input_ids.clamp(min=0))
        places = (-1 - input_ids).clamp(min=0).unsqueeze(-1).expand(-1, -1, features.shape[2])
        return torch.where((input_ids < 0).unsqueeze(-1), features.gather(1, places), tokens)

    def compute_past(self, ids: Tensor) -> Tensor:
        return super().compute_past(ids.clamp(min=0))

    def select_source(self, source: Mapping[str, Tensor], generation: GenerationSettings) -> dict[str, Tensor]:
        ids, mask = align_right(source["input_ids"], source["attention_mask"], generation.pad_token_id)
        has_image = (ids < 0).any(dim=1)
        images = {"pixel_values": source["pixel_values"][has_image]} if bool(has_image.any()) else {}
        token = cast(Any, self.model).config.image_token_id
        return {"input_ids": ids.where(ids >= 0, token), "attention_mask": mask, **images}

    @torch.inference_mode()
    def count_patches(self, shape: tuple[int, ...]) -> int:
        """Count the patches of an image of this shape, [channels, height, width], as texts have places for them."""
        return int(self.encode_images(torch.zeros(1, *shape)).shape[1])
