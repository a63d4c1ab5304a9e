"""LLaVA, Idefics 3 and SmolVLM: towers that read frames of one size, one by one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.models.vision_family import VisionFamily
from laconic.tasks.decoder_tensors import find_compared_patches


@dataclass(frozen=True)
class FrameFamily(VisionFamily):
    """Models whose frames have one size, and are encoded one by one. encode_frames: from the model, its config and
    frames, [frames, channels, height, width], to what the language model reads, [frames, patches, width].
    prepare_tower: what is done with the model first. has_rows: whether transformers takes the frames of texts with an
    axis of texts in front."""

    encode_frames: Callable[[Any, Any, Tensor], Tensor]
    prepare_tower: Callable[[Any], None] | None = None
    has_rows: bool = False

    def prepare(self, model: Any) -> None:
        if self.prepare_tower is not None:
            self.prepare_tower(model)

    def encode(self, model: Any, config: Any, pixels: Tensor, places: Tensor | None) -> tuple[Tensor, Tensor]:
        frames = self.encode_frames(model, config, pixels.flatten(0, 1))
        features = frames.reshape(pixels.shape[0], -1, frames.shape[2])
        return features, features[:, find_compared_patches(frames.shape[1])]

    def select_images(
        self, model: Any, config: Any, ids: Tensor, pixels: Tensor, places: Tensor | None
    ) -> dict[str, Tensor]:
        patches = self.encode(model, config, pixels[:1, :1], places)[0].shape[1]
        counts = [-(int(row.min().clamp(max=0)) // patches) for row in ids]
        frames = torch.cat([row[:count] for row, count in zip(pixels, counts, strict=True)])
        if not len(frames):
            return {}
        return {"pixel_values": frames[None] if self.has_rows else frames}


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


LLAVA = FrameFamily("language_model", encode_llava)
IDEFICS = FrameFamily("text_model", encode_idefics, fix_places, has_rows=True)
