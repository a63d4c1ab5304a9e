"""Families of transformers that read images."""

from typing import Any

from family_checkpoint import BARE, SIZE, SQUARE, VIT, Family, image

SHORTEST: dict[str, Any] = {"size": {"shortest_edge": SIZE}}
CENTRE: dict[str, Any] = {"size": {"shortest_edge": 72}, "crop_size": SQUARE["size"]}
"""The shorter side resized, and the centre cut out."""

IMAGE_FAMILIES: dict[str, Family] = {
    "ViT": image("ViT", "ViTImageProcessorPil", **VIT),
    "DeiT": image("DeiT", "DeiTImageProcessorPil", SQUARE | {"crop_size": SQUARE["size"]}, **VIT),
    "BEiT": image("Beit", "BeitImageProcessorPil", SQUARE | {"crop_size": SQUARE["size"]}, **VIT),
    "DINOv2": image(
        "Dinov2", "BitImageProcessorPil", CENTRE, **VIT
    ),
    "Swin": image(
        "Swin", "ViTImageProcessorPil", image_size=SIZE, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4],
        window_size=4,
    ),
    "ResNet": image(
        "ResNet", "ConvNextImageProcessorPil", SHORTEST, embedding_size=16,
        hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic",
    ),
    "RegNet": image(
        "RegNet", "ConvNextImageProcessorPil", SHORTEST, embedding_size=16,
        hidden_sizes=[16, 32], depths=[1, 1], groups_width=8,
    ),
    "ConvNeXt": image(
        "ConvNext", "ConvNextImageProcessorPil", SHORTEST, hidden_sizes=[16, 32],
        depths=[1, 1], num_stages=2, image_size=SIZE,
    ),
    "ConvNeXt V2": image(
        "ConvNextV2", "ConvNextImageProcessorPil", SHORTEST, hidden_sizes=[16, 32],
        depths=[1, 1], num_stages=2, image_size=SIZE,
    ),
    "MobileNet V1": image(
        "MobileNetV1", "MobileNetV1ImageProcessorPil", CENTRE,
        depth_multiplier=0.25,
    ),
    "MobileNet V2": image(
        "MobileNetV2", "MobileNetV2ImageProcessorPil", CENTRE,
        depth_multiplier=0.25,
    ),
    "EfficientNet": image(
        "EfficientNet", "EfficientNetImageProcessorPil", image_size=SIZE, width_coefficient=0.25,
        depth_coefficient=0.25, hidden_dim=320, dropout_rate=0.0,
    ),
    "MobileViT": image(
        "MobileViT", "MobileViTImageProcessorPil", CENTRE,
        image_size=SIZE, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64],
    ),
    "MobileViT V2": image(
        "MobileViTV2", "MobileViTImageProcessorPil", CENTRE,
        image_size=SIZE, width_multiplier=0.25,
    ),
    "LeViT": image(
        "Levit", "LevitImageProcessorPil", image_size=224, hidden_sizes=[32, 48, 64], num_attention_heads=[2, 3, 4],
        key_dim=[8, 8, 8], depths=[1, 1, 1],
    ),
    "PoolFormer": image(
        "PoolFormer", "PoolFormerImageProcessorPil", {"size": {"shortest_edge": SIZE}, "crop_size": SQUARE["size"]},
        hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
    ),
    "PVT": image("Pvt", "PvtImageProcessorPil", image_size=SIZE, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
    ),
    "SegFormer": image(
        "Segformer", "SegformerImageProcessorPil", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
    ),
    "CvT": image(
        "Cvt", "ConvNextImageProcessorPil", SHORTEST, embed_dim=[8, 16, 32],
        num_heads=[1, 2, 4], depth=[1, 2, 3], image_size=SIZE,
    ),
    "BiT": image("Bit", "BitImageProcessorPil", CENTRE,
        embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], num_groups=8,
    ),
    "FocalNet": image(
        "FocalNet", "BitImageProcessorPil", CENTRE,
        image_size=SIZE, embed_dim=16, depths=[1, 1], hidden_sizes=[16, 32],
    ),
    "SwinV2": image(
        "Swinv2", "ViTImageProcessorPil", image_size=SIZE, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4],
        window_size=4,
    ),
    "DINOv2 with registers": image("Dinov2WithRegisters", "BitImageProcessorPil", CENTRE, **VIT),
    "Data2Vec vision": image("Data2VecVision", "BeitImageProcessorPil", SQUARE | {"crop_size": SQUARE["size"]}, **VIT),
    "ViT-MSN": image("ViTMSN", "ViTImageProcessorPil", **VIT),
    "ViT-MAE": image("ViTMAE", "ViTImageProcessorPil", **VIT, head=BARE, mask_ratio=0.0),
    "I-JEPA": image("IJepa", "ViTImageProcessorPil", **VIT),
    "Hiera": image(
        "Hiera", "BitImageProcessorPil", CENTRE, image_size=[SIZE, SIZE], embed_dim=16, depths=[1, 1, 1, 1],
        num_heads=[1, 2, 4, 8],
    ),
    "PVT v2": image("PvtV2", "PvtImageProcessorPil", image_size=SIZE, hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 3, 4],
    ),
    "SwiftFormer": image("SwiftFormer", "ViTImageProcessorPil", image_size=SIZE, embed_dims=[16, 24, 32, 48],
        depths=[1, 1, 1, 1],
    ),
    "HGNet v2": image("HGNetV2", "ConvNextImageProcessorPil", SHORTEST, embedding_size=16,
        stem_channels=[3, 8, 16], hidden_sizes=[16, 32, 48, 64], stage_in_channels=[16, 16, 32, 48],
        stage_mid_channels=[8, 8, 16, 16], stage_out_channels=[16, 32, 48, 64], stage_num_blocks=[1, 1, 1, 1],
        stage_numb_of_layers=[2, 2, 2, 2],
    ),
    "TextNet": image("TextNet", "ViTImageProcessorPil"),
    "DINOv3": image("DINOv3ViT", "ViTImageProcessorPil", **VIT, head=BARE),
    "CLIP classifier": image("CLIP", "CLIPImageProcessorPil", CENTRE, vision_config=VIT),
    "SigLIP classifier": image("Siglip", "SiglipImageProcessorPil", vision_config=VIT),
    "DINOv3 ConvNeXt": image("DINOv3ConvNext", "ViTImageProcessorPil", head=BARE, hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1], image_size=SIZE,
    ),
    "Donut-Swin": image(
        "DonutSwin", "ViTImageProcessorPil", image_size=SIZE, patch_size=4, embed_dim=16, depths=[1, 1],
        num_heads=[2, 4], window_size=4,
    ),
}  # fmt: skip
