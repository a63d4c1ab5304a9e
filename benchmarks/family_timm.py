"""Models of timm, by its own builder: real architectures, narrow where they take a width, at 64 x 64."""

from typing import Any

SETTINGS: dict[str, dict[str, Any]] = {
    "test_byobnet": {},
    "test_convnext": {},
    "test_convnext2": {},
    "test_efficientnet": {},
    "test_efficientnet_evos": {},
    "test_efficientnet_gn": {},
    "test_mambaout": {},
    "test_nfnet": {},
    "test_resnet": {},
    "resnet18": {},
    "resnet26d": {},
    "seresnet50": {},
    "mobilenetv2_035": {},
    "mobilenetv3_small_050": {},
    "ghostnet_050": {},
    "mnasnet_small": {},
    "regnetx_002": {},
    "test_vit": {"img_size": 64},
    "test_vit2": {"img_size": 64},
    "test_vit_relpos": {"img_size": 64},
    "swin_tiny_patch4_window7_224": {"img_size": 64, "window_size": 4, "embed_dim": 24, "num_heads": [1, 2, 4, 8]},
    "mixer_s32_224": {"img_size": 64, "num_blocks": 2, "embed_dim": 64},
}
TIMM = {name: {"model_name": name, "num_classes": 5} | settings for name, settings in SETTINGS.items()}
"""By name, the arguments of timm.create_model."""
