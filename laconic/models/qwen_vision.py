"""Qwen2-VL and Qwen2.5-VL: a tower for images of any size, and rotary positions in time, height and width."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision

from laconic.models.vision_family import VisionFamily
from laconic.tasks.decoder_tensors import COMPARED_PATCHES

HIDING = -1e9
"""Added to the scores of patches that are not to be read, whose share is then 0, in BF16 too."""


class QwenFamily(VisionFamily):
    """A frame is a block of neighbouring patches, which the tower merges into one token. The blocks of an image attend
    to each other, in Qwen2.5-VL in most layers to those of a window alone; the two are told from the blocks' places."""

    def measure_side(self, config: Any) -> int:
        return int(config.patch_size * config.spatial_merge_size)

    def encode(self, model: Any, config: Any, pixels: Tensor, places: Tensor | None) -> tuple[Tensor, Tensor]:
        assert places is not None
        tower, rows = model.visual, pixels.shape[0]
        inside = places[..., 2:] - places[..., 1:2]
        states = tower.patch_embed(split_blocks(pixels.flatten(0, 1), config.vision_config).flatten(1))
        angles = tower.rotary_pos_emb(states, locate_patches(inside, tower.spatial_merge_size))
        cos, sin = (each.reshape(rows, -1, each.shape[-1]) for each in angles)
        states = states.reshape(rows, -1, states.shape[-1])
        masks = list(mask_layers(tower, places[..., 1:2], inside))
        for block, mask in zip(tower.blocks, masks, strict=True):
            states = states + attend(block.attn, block.norm1(states), cos, sin, mask)
            states = states + block.mlp(block.norm2(states))
        features = tower.merger(states.flatten(0, 1)).reshape(rows, -1, model.language_model.config.hidden_size)
        count = (places[..., :1] >= 0).sum(dim=1)
        compared = torch.arange(COMPARED_PATCHES, device=count.device) * count // COMPARED_PATCHES
        return features, features.gather(1, compared.unsqueeze(-1).expand(-1, -1, features.shape[2]))

    def position(self, position_ids: Tensor | None, input_ids: Tensor, places: Tensor | None) -> Any:
        """Return the positions in time, height and width, [3, batch, seq]: of a block its own; of a token of text its
        index, less the most by which the indices of blocks before it are ahead of their positions."""
        assert position_ids is not None
        assert places is not None
        indices, positions = places[:, None, :, 0], places[..., 1:]
        ahead = indices - torch.maximum(places[:, None, :, 2], places[:, None, :, 3])
        each = position_ids.unsqueeze(-1)
        # Subtracted before the reduction: OpenVINO 2026.4 takes the first row's number for all where it is done after.
        texts = (each - torch.where(indices < each, ahead, 0)).amin(dim=-1)
        images = positions.gather(1, (-1 - input_ids).clamp(min=0).unsqueeze(-1).expand(-1, -1, 3))
        return torch.where(input_ids < 0, images.permute(2, 0, 1), texts)

    def select_images(
        self, model: Any, config: Any, ids: Tensor, pixels: Tensor, places: Tensor | None
    ) -> dict[str, Tensor]:
        assert places is not None
        has_frame = places[..., 0] >= 0
        if not has_frame.any():
            return {}
        grids = []
        for located in (each[own] for each, own in zip(places, has_frame, strict=True)):
            for time in located[:, 1].unique():
                rows, columns = (located[located[:, 1] == time, 2:].amax(dim=0) - time + 1).tolist()
                merged = config.vision_config.spatial_merge_size
                grids.append([1, rows * merged, columns * merged])
        patches = split_blocks(pixels[has_frame], config.vision_config).flatten(1)
        return {"pixel_values": patches, "image_grid_thw": torch.tensor(grids), "mm_token_type_ids": (ids < 0).long()}


def split_blocks(blocks: Tensor, config: Any) -> Tensor:
    """Split blocks, [blocks, channels, height, width], into patches, in the order that the tower merges them in:
    [patches, channels, time, height, width]. An image is repeated in time, where a video has its next one."""
    side, merged = config.patch_size, config.spatial_merge_size
    divided = blocks.reshape(-1, blocks.shape[1], merged, side, merged, side)
    patches = divided.permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
    return patches.unsqueeze(2).expand(-1, -1, config.temporal_patch_size, -1, -1)


def locate_patches(inside: Tensor, merged: int) -> Tensor:
    """Locate the patches of blocks in their images: [patches, 2], rows and columns. inside: those of the blocks,
    [batch, blocks, 2]. merged: patches along a side of a block."""
    steps = torch.arange(merged, device=inside.device)
    offsets = torch.stack([steps.repeat_interleave(merged), steps.repeat(merged)], dim=1)
    return (inside.unsqueeze(2) * merged + offsets).flatten(0, 2)


def mask_layers(tower: Any, images: Tensor, inside: Tensor) -> Iterator[Tensor]:
    """Yield for each layer what is added to the scores of its attention, [batch, 1, patches, patches]. images: the
    position in time of blocks, which is another in each image, [batch, blocks, 1]. inside: their rows and columns,
    [batch, blocks, 2]."""
    size = tower.spatial_merge_size**2
    whole = hide_others(images, size)
    if not hasattr(tower, "fullatt_block_indexes"):
        yield from [whole] * len(tower.blocks)
        return
    side = tower.window_size // tower.spatial_merge_size // tower.patch_size
    window = hide_others(torch.cat([images, inside.div(side, rounding_mode="floor")], dim=-1), size)
    for layer in range(len(tower.blocks)):
        yield whole if layer in tower.fullatt_block_indexes else window


def hide_others(groups: Tensor, size: int) -> Tensor:
    """Return 0 for patches in the same group and `HIDING` for others, [batch, 1, patches, patches]. groups: numbers
    that the group of each block has, [batch, blocks, numbers]. size: patches of a block.

    With a condition in place of numbers, the graph looks for NaN in the weights of each attention, and OpenVINO keeps
    them all: 5.3 GB for 4,096 patches and 16 heads, in place of 0.5 GB."""
    each = groups.unsqueeze(2).expand(-1, -1, size, -1).flatten(1, 2)
    return torch.where((each.unsqueeze(2) == each.unsqueeze(1)).all(dim=-1), 0.0, HIDING).unsqueeze(1)


def attend(attention: Any, states: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
    """Compute the attention of patches, [batch, patches, width], where transformers splits them by images instead of
    masking them."""
    query, key, value = attention.qkv(states).unflatten(2, (3, attention.num_heads, -1)).unbind(2)
    query, key = apply_rotary_pos_emb_vision(query, key, cos, sin)
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    projected: Tensor = attention.proj(attended.transpose(1, 2).flatten(2))
    return projected


QWEN = QwenFamily("language_model")
