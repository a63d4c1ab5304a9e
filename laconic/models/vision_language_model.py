"""Vision-language models of transformers: a tower of images, and a language model that reads texts with these."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from laconic.errors import SourceError
from laconic.models.decoder_cache import make_cache
from laconic.models.frame_vision import IDEFICS, LLAVA
from laconic.models.language_model import LanguageModel, align_right
from laconic.models.qwen_vision import QWEN
from laconic.models.vision_family import VisionFamily
from laconic.tasks.decoder_tensors import IMAGE_FEATURES, PIXELS, PLACES
from laconic.tasks.generation_settings import GenerationSettings

FAMILIES: dict[str, VisionFamily] = {
    "llava": LLAVA,
    "idefics3": IDEFICS,
    "smolvlm": IDEFICS,
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
}
"""By `model_type`, the models whose tokens see those before them alone."""
NO_PLACE = torch.zeros(1, 1, 4, dtype=torch.int64)
"""The places of one frame, which is the first token of a text."""


class VisionLanguageModel(LanguageModel):
    """A language model whose texts have images in them.

    input_ids: as of `LanguageModel`; an id below 0 is a patch of the row's images, -1 the first one. pixel_values:
    [batch, frames, channels, height, width] float32; None for texts alone. image_places: for the families that read
    them, of each frame the index of its token in the row's text, and its position in time, height and width, [batch,
    frames, 4] int64; -1 where a row has no frame. The rest as of `LanguageModel`.

    Returns what `LanguageModel` does, and `image_features`, what the tower and its projector make of some patches:
    [batch, patches, width] float32. Training reads texts alone.
    """

    def __init__(self, model: Any) -> None:
        kind = model.config.model_type
        if kind not in FAMILIES:
            raise SourceError(
                f"a vision-language model of the type {kind!r} is not supported; expected one of {', '.join(FAMILIES)}"
            )
        super().__init__(model)
        self.family = FAMILIES[kind]
        self.family.prepare(model.base_model)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        past: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_places: Tensor | None = None,
    ) -> dict[str, Tensor]:
        if pixel_values is None:
            return super().forward(input_ids, attention_mask, position_ids, past)
        model = cast(Any, self.model)
        features, compared = self.family.encode(model.base_model, model.config, pixel_values, image_places)
        positions = self.family.position(position_ids, input_ids, image_places)
        options: dict[str, Any] = {"position_ids": positions, "use_cache": False}
        if past is not None and (torch.compiler.is_exporting() or past.shape[3]):
            options |= {"past_key_values": make_cache(past), "use_cache": True}
        body = getattr(model.base_model, self.family.body)
        states = body(inputs_embeds=self.embed(input_ids, features), **options).last_hidden_state
        logits = self.compute_logits(states if self.scale == 1 else states * self.scale)
        return self.describe(logits, attention_mask, input_ids.clamp(min=0)) | {IMAGE_FEATURES: compared}

    def embed(self, input_ids: Tensor, features: Tensor) -> Tensor:
        """Embed tokens, and patches of images: [batch, seq, width]. features: [batch, patches, width]."""
        tokens = cast(Any, self.model).get_input_embeddings()(input_ids.clamp(min=0))
        places = (-1 - input_ids).clamp(min=0).unsqueeze(-1).expand(-1, -1, features.shape[2])
        return torch.where((input_ids < 0).unsqueeze(-1), features.gather(1, places), tokens)

    def compute_past(self, ids: Tensor) -> Tensor:
        return super().compute_past(ids.clamp(min=0))

    def select_source(self, source: Mapping[str, Tensor], generation: GenerationSettings) -> dict[str, Tensor]:
        ids, mask = align_right(source["input_ids"], source["attention_mask"], generation.pad_token_id)
        model = cast(Any, self.model)
        images = self.family.select_images(model.base_model, model.config, ids, source[PIXELS], source.get(PLACES))
        return {"input_ids": ids.where(ids >= 0, model.config.image_token_id), "attention_mask": mask, **images}

    @torch.inference_mode()
    def count_patches(self, shape: tuple[int, ...]) -> int:
        """Count the patches of a frame of this shape, [channels, height, width], as texts have places for them."""
        model = cast(Any, self.model)
        features, _ = self.family.encode(model.base_model, model.config, torch.zeros(1, 1, *shape), NO_PLACE)
        return int(features.shape[1])
