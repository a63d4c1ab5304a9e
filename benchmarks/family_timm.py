"""Models of timm, saved as timm saves them: real architectures, narrow where they take a width, at 64 x 64."""

import importlib
from pathlib import Path
from typing import Any

import torch
from family_checkpoint import CLASSES, SIZE, sharpen
from PIL import Image
from torch import nn

TIMM: dict[str, dict[str, Any]] = {
    "resnet18": {},
    "resnet26d": {},
    "seresnet50": {},
    "resnext26ts": {},
    "skresnet18": {},
    "efficientnet_b0": {},
    "mobilenetv2_035": {},
    "mobilenetv3_small_050": {},
    "mobilenetv4_conv_small_050": {},
    "ghostnet_050": {},
    "lcnet_050": {},
    "tinynet_e": {},
    "mnasnet_small": {},
    "regnetx_002": {},
    "regnety_002": {},
    "densenet121": {},
    "vgg11": {"mlp_ratio": 0.1},
    "convnext_atto": {},
    "repvgg_a0": {},
    "hrnet_w18_small": {},
    "dla34": {},
    "rexnet_100": {},
    "inception_next_atto": {},
    "poolformer_s12": {},
    "test_nfnet": {},
    "vit_tiny_patch16_224": {"img_size": SIZE, "depth": 3},
    "deit_tiny_distilled_patch16_224": {"img_size": SIZE, "depth": 3},
    "beit_base_patch16_224": {"img_size": SIZE, "depth": 2, "embed_dim": 96, "num_heads": 4},
    "eva02_tiny_patch14_224": {"img_size": SIZE, "patch_size": 16, "depth": 2},
    "swin_tiny_patch4_window7_224": {"img_size": SIZE, "window_size": 4, "embed_dim": 24, "num_heads": [1, 2, 4, 8]},
    "cait_xxs24_224": {"img_size": SIZE, "depth": 3},
    "xcit_nano_12_p16_224": {"img_size": SIZE, "depth": 3},
    "mixer_s32_224": {"img_size": SIZE},
    "gmlp_ti16_224": {"img_size": SIZE},
    "levit_128s": {"img_size": SIZE},
    "mobilevit_xxs": {},
    "mobilevitv2_050": {},
    "edgenext_xx_small": {},
    "coatnet_pico_rw_224": {"img_size": SIZE},
    "maxvit_pico_rw_256": {"img_size": SIZE},
    "efficientformerv2_s0": {"img_size": SIZE},
    "fastvit_t8": {},
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
