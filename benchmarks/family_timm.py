"""Models of timm, saved as timm saves them: real architectures, narrow where they take a width, at 64 x 64."""

import importlib
from pathlib import Path
from typing import Any

import torch
from family_checkpoint import CLASSES, SIZE, sharpen
from PIL import Image
from torch import nn

SHALLOW = [1, 1, 1, 1]
TIMM: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": {"img_size": SIZE, "depth": 2, "embed_dim": 96, "num_heads": 4},
    "vit_tiny_patch16_224": {"img_size": SIZE, "depth": 3},
    "swin_tiny_patch4_window7_224": {"img_size": SIZE, "window_size": 4, "embed_dim": 24, "num_heads": [1, 2, 4, 8]},
    "resnet18": {},
    "test_efficientnet": {},
    "mobilenetv3_small_050": {},
    "convnext_atto": {"depths": [1, 1, 2, 1], "dims": [24, 48, 96, 192]},
    "densenet121": {"block_config": [2, 2, 2, 2]},
    "regnetx_002": {},
    "deit_tiny_distilled_patch16_224": {"img_size": SIZE, "depth": 2},
    "levit_128s": {"img_size": SIZE, "depth": [1, 1, 1]},
    "edgenext_xx_small": {"depths": [1, 1, 2, 1]},
    "mobilevit_xxs": {},
    "mixer_s32_224": {"img_size": SIZE},
    "resnext50_32x4d": {"layers": SHALLOW},
    "coatnet_pico_rw_224": {"img_size": SIZE, "depths": SHALLOW},
    "repvgg_a0": {},
    "ghostnet_050": {},
    "maxvit_pico_rw_256": {"img_size": SIZE, "depths": SHALLOW},
    "seresnet50": {"layers": SHALLOW},
    "test_nfnet": {},
    "xcit_nano_12_p16_224": {"img_size": SIZE, "depth": 2},
    "eva02_tiny_patch14_224": {"img_size": SIZE, "patch_size": 16, "depth": 2},
    "fastvit_t8": {"layers": SHALLOW},
    "starnet_s050": {"depths": SHALLOW},
    "rexnet_100": {"width_mult": 0.3, "depth_mult": 0.3},
    "pvt_v2_b0": {"depths": SHALLOW},
    "vgg11": {"mlp_ratio": 0.1},
    "skresnet18": {"layers": SHALLOW},
    "inception_next_atto": {"depths": SHALLOW},
    "mambaout_femto": {"depths": SHALLOW},
    "cait_xxs24_224": {"img_size": SIZE, "depth": 2},
    "hrnet_w18_small": {},
    "efficientformerv2_s0": {"img_size": SIZE, "depths": [1, 1, 2, 2]},
    "efficientvit_b0": {},
    "lcnet_050": {},
    "gmlp_ti16_224": {"img_size": SIZE},
    "resnet26d": {"layers": SHALLOW},
    "hiera_tiny_224": {"img_size": SIZE, "stages": SHALLOW},
}
"""By name, the arguments of timm.create_model."""


def write_timm(name: str, folder: Path, images: list[Path]) -> None:
    """Save a model with random weights as timm does: blocks that would begin without an effect have one, and a few
    batches have set the means of normalizations."""
    timm = importlib.import_module("timm")  # not a dependency: only these rows need it
    torch.manual_seed(0)
    model = sharpen(timm.create_model(name, num_classes=len(CLASSES), **TIMM[name]))
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = None  # the mean of all batches
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim == 1 and not path.endswith("bias") and parameter.abs().max() < 1e-2:
                parameter.fill_(1.0)
        model.train()
        for start in range(0, 96, 32):
            model(torch.stack([prepare_image(model, path) for path in images[start : start + 32]]))
    importlib.import_module("timm.models").save_for_hf(
        model.eval(),
        folder,
        model_config={"label_names": list(CLASSES)},
        safe_serialization=True,
        data_config={"input_size": (3, SIZE, SIZE)},
    )


def prepare_image(model: Any, path: Path) -> torch.Tensor:
    """The input that timm makes of an image, [channels, height, width]."""
    data = importlib.import_module("timm.data")
    settings = data.resolve_data_config({"input_size": (3, SIZE, SIZE)}, model=model)
    with Image.open(path) as image:
        pixels: torch.Tensor = data.create_transform(**settings)(image)
    return pixels
