"""Vision-language models of transformers: a tower of images, and a language model that reads texts with these."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from laconic.errors import SourceError
from laconic.models.decoder_cache import make_cache
from laconic.models.language_model import LanguageModel, align_right
from laconic.tasks.decoder_tensors import IMAGE_FEATURES, find_compared_patches
from laconic.tasks.generation_settings import GenerationSettings


def encode_llava(model: Any, config: Any, frames: Tensor) -> Tensor:
    """Encode frames as LLaVA does (Liu et al., Visual Instruction Tuning, 2023): [frames, patches, width]. As
    `get_image_features` of transformers, which makes a list of the images of a batch, so that a graph would hold their
    number."""
    states = model.vision_tower(frames, output_hidden_states=True).hidden_states
    layers = config.vision_feature_layer
    chosen = [states[layer] for layer in ([layers] if isinstance(layers, int) else layers)]
    if config.vision_feature_select_strategy == "default":  # without the token of the class
        chosen = [each[:, 1:] for each in chosen]
    features: Tensor = model.multi_modal_projector(torch.cat(chosen, dim=-1))
    return features


def encode_idefics(model: Any, config: Any, frames: Tensor) -> Tensor:
    """Encode frames as Idefics 3 does, neighbouring patches put together by a pixel shuffle (Laurençon et al., Building
    and better understanding vision-language models, 2024): [frames, patches, width]. Without the mask of
    `get_image_features`, which is for frames of several sizes."""
    tower = model.vision_model
    states = tower.embeddings.patch_embedding(frames).flatten(2).transpose(1, 2)
    states = states + tower.embeddings.position_embedding(tower.places)
    states = tower.encoder(inputs_embeds=states, attention_mask=None).last_hidden_state
    features: Tensor = model.connector(tower.post_layernorm(states))
    return features


def fix_places(model: Any) -> None:
    """Give the tower of an Idefics 3 the rows of its table of positions that a frame of the tower's own size reads, as
    `places`, [1, patches] int64. The embeddings choose them by fractions whose rounding differs between processors, in
    a way that no graph holds."""
    embeddings = model.vision_model.embeddings
    side = embeddings.num_patches_per_side
    read: list[Tensor] = []
    hook = embeddings.position_embedding.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
    weight = embeddings.patch_embedding.weight
    frame = weight.new_zeros(1, weight.shape[1], *[side * embeddings.patch_size] * 2)
    with hook, torch.no_grad():
        embeddings(pixel_values=frame, patch_attention_mask=weight.new_ones(1, side, side, dtype=torch.bool))
    model.vision_model.register_buffer("places", read[0], persistent=False)


@dataclass(frozen=True)
class VisionFamily:
    """What differs between vision-language models. body: the name of their language model. encode: from the model, its
    config and frames, [frames, channels, height, width], to what the language model reads, [frames, patches, width].
    prepare: what is done with the model first. has_rows: whether transformers takes the frames of texts with an axis of
    texts in front."""

    body: str
    encode: Callable[[Any, Any, Tensor], Tensor]
    prepare: Callable[[Any], None] | None = None
    has_rows: bool = False


IDEFICS = VisionFamily("text_model", encode_idefics, fix_places, has_rows=True)
FAMILIES = {"llava": VisionFamily("language_model", encode_llava), "idefics3": IDEFICS, "smolvlm": IDEFICS}
"""By `model_type`, the models whose frames have one size, and whose tokens see those before them alone."""


class VisionLanguageModel(LanguageModel):
    """A language model whose texts have images in them.

    input_ids: as of `LanguageModel`; an id below 0 is a patch of the row's images, -1 the first one. pixel_values:
    [batch, frames, channels, height, width] float32; None for texts alone. The rest as of `LanguageModel`.

    Returns what `LanguageModel` does, and `image_features`, what the tower and its projector make of some patches of
    the first frame: [batch, patches, width] float32. Training reads texts alone.
    """

    def __init__(self, model: Any) -> None:
        kind = model.config.model_type
        if kind not in FAMILIES:
            raise SourceError(
                f"a vision-language model of the type {kind!r} is not supported; expected one of {', '.join(FAMILIES)}"
            )
        super().__init__(model)
        self.family = FAMILIES[kind]
        if self.family.prepare is not None:
            self.family.prepare(model.base_model)

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
        frames = self.encode_frames(pixel_values.flatten(0, 1))
        features = frames.reshape(pixel_values.shape[0], -1, frames.shape[2])
        options: dict[str, Any] = {"use_cache": False}
        if past is not None and (torch.compiler.is_exporting() or past.shape[3]):
            options = {"position_ids": position_ids, "past_key_values": make_cache(past), "use_cache": True}
        body = getattr(cast(Any, self.model).base_model, self.family.body)
        states = body(inputs_embeds=self.embed(input_ids, features), **options).last_hidden_state
        logits = self.compute_logits(states if self.scale == 1 else states * self.scale)
        compared = features[:, find_compared_patches(frames.shape[1])]
        return self.describe(logits, attention_mask, input_ids.clamp(min=0)) | {IMAGE_FEATURES: compared}

    def encode_frames(self, frames: Tensor) -> Tensor:
        """Encode frames, [frames, channels, height, width]: [frames, patches, width]."""
        model = cast(Any, self.model)
        return self.family.encode(model.base_model, model.config, frames)

    def embed(self, input_ids: Tensor, features: Tensor) -> Tensor:
        """Embed tokens, and patches of images: [batch, seq, width]. features: [batch, patches, width]."""
        tokens = cast(Any, self.model).get_input_embeddings()(input_ids.clamp(min=0))
        places = (-1 - input_ids).clamp(min=0).unsqueeze(-1).expand(-1, -1, features.shape[2])
        return torch.where((input_ids < 0).unsqueeze(-1), features.gather(1, places), tokens)

    def compute_past(self, ids: Tensor) -> Tensor:
        return super().compute_past(ids.clamp(min=0))

    def select_source(self, source: Mapping[str, Tensor], generation: GenerationSettings) -> dict[str, Tensor]:
        ids, mask = align_right(source["input_ids"], source["attention_mask"], generation.pad_token_id)
        pixels = source["pixel_values"]
        patches = self.count_patches(tuple(pixels.shape[2:]))
        counts = [-(int(row.min().clamp(max=0)) // patches) for row in ids]
        frames = torch.cat([row[:count] for row, count in zip(pixels, counts, strict=True)])
        images = {"pixel_values": frames[None] if self.family.has_rows else frames} if len(frames) else {}
        token = cast(Any, self.model).config.image_token_id
        return {"input_ids": ids.where(ids >= 0, token), "attention_mask": mask, **images}

    @torch.inference_mode()
    def count_patches(self, shape: tuple[int, ...]) -> int:
        """Count the patches of a frame of this shape, [channels, height, width], as texts have places for them."""
        return int(self.encode_frames(torch.zeros(1, *shape)).shape[1])
