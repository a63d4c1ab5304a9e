"""Families of transformers that find objects in images, or the class of each pixel."""

from typing import Any

import transformers
from family_checkpoint import VIT, Family, image

OBJECTS, PIXELS = "ForObjectDetection", "ForSemanticSegmentation"
SIDES: dict[str, Any] = {"size": {"shortest_edge": 64, "longest_edge": 96}}
CENTRE: dict[str, Any] = {"size": {"shortest_edge": 72}, "crop_size": {"height": 64, "width": 64}}
MAPS: dict[str, Any] = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [1] * 4,
    "layer_type": "basic",
}
HGNET: dict[str, Any] = {
    "embedding_size": 16,
    "stem_channels": [3, 8, 16],
    "hidden_sizes": [16, 32, 48, 64],
    "stage_in_channels": [16, 16, 32, 48],
    "stage_mid_channels": [8, 8, 16, 16],
    "stage_out_channels": [16, 32, 48, 64],
    "stage_num_blocks": [1] * 4,
    "stage_numb_of_layers": [2] * 4,
}
LEVELS = {"out_features": ["stage2", "stage3", "stage4"]}
LAYERS: dict[str, Any] = {
    "num_queries": 10,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}


def detr(config: str) -> Family:
    """A relative of DETR, with a ResNet before it."""
    backbone = transformers.ResNetConfig(**MAPS, out_features=["stage4"])
    plain = {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False, "dropout": 0.0}
    return image(config, f"{config}ImageProcessorPil", SIDES, head=OBJECTS, backbone_config=backbone, **plain, **LAYERS)


MAP_FAMILIES: dict[str, Family] = {
    "DETR": detr("Detr"),
    "Conditional DETR": detr("ConditionalDetr"),
    "RT-DETR": image(
        "RTDetr", "RTDetrImageProcessorPil", head=OBJECTS, **LAYERS, num_denoising=4, encoder_hidden_dim=32,
        backbone_config=transformers.RTDetrResNetConfig(**MAPS, **LEVELS), encoder_in_channels=[16, 24, 32],
        decoder_in_channels=[32] * 3,
    ),
    "RT-DETR v2": image(
        "RTDetrV2", "RTDetrImageProcessorPil", head=OBJECTS, **LAYERS, num_denoising=4, encoder_hidden_dim=32,
        backbone_config=transformers.RTDetrResNetConfig(**MAPS, **LEVELS), encoder_in_channels=[16, 24, 32],
        decoder_in_channels=[32] * 3,
    ),
    "D-FINE": image(
        "DFine", "RTDetrImageProcessorPil", head=OBJECTS, **LAYERS, num_denoising=4, encoder_hidden_dim=32,
        backbone_config=transformers.HGNetV2Config(**HGNET, **LEVELS), encoder_in_channels=[32, 48, 64],
        decoder_in_channels=[32] * 3,
    ),
    "Deformable DETR": image(
        "DeformableDetr", "DeformableDetrImageProcessorPil", head=OBJECTS, **(LAYERS | {"d_model": 64}), dropout=0.0,
        use_timm_backbone=False, backbone=None, use_pretrained_backbone=False,
        backbone_config=transformers.ResNetConfig(**MAPS, **LEVELS),
    ),
    "Table Transformer": image(
        "TableTransformer", "DetrImageProcessorPil", SIDES, head=OBJECTS, **LAYERS, dropout=0.0,
        use_timm_backbone=False, backbone=None, use_pretrained_backbone=False,
        backbone_config=transformers.ResNetConfig(**MAPS, out_features=["stage4"]),
    ),
    "YOLOS": image(
        "Yolos", "YolosImageProcessorPil", SIDES, head=OBJECTS, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=64, image_size=[64, 96], num_detection_tokens=10,
    ),
    "SegFormer segmenter": image(
        "Segformer", "SegformerImageProcessorPil", head=PIXELS, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=32,
    ),
    "UperNet": image(
        "UperNet", "SegformerImageProcessorPil", head=PIXELS, hidden_size=32, auxiliary_channels=16,
        auxiliary_in_channels=32, backbone_config=transformers.SwinConfig(
            image_size=64, patch_size=4, embed_dim=8, depths=[1] * 4, num_heads=[1, 2, 4, 8], window_size=4,
            out_features=["stage1", "stage2", "stage3", "stage4"],
        ),
    ),
    "BEiT segmenter": image(
        "Beit", "BeitImageProcessorPil", head=PIXELS, **(VIT | {"num_hidden_layers": 4}), out_indices=[1, 2, 3, 4],
    ),
    "DPT segmenter": image(
        "DPT", "DPTImageProcessorPil", head=PIXELS, **(VIT | {"num_hidden_layers": 4}),
        backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 16, 24, 32], fusion_hidden_size=16,
    ),
    "MobileViT segmenter": image(
        "MobileViT", "MobileViTImageProcessorPil", CENTRE,
        head=PIXELS, image_size=64, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64],
    ),
}  # fmt: skip
