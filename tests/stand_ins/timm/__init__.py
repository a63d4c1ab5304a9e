"""What Laconic calls of timm, where timm is not installed: one small model, saved and opened as timm 1.0.31 does it.

timm needs torchvision, whose build for the CPU is in no package index that pip knows by itself.
"""

import json
from pathlib import Path

from safetensors.torch import load_file
from torch import nn

__version__ = "1.0.31"
DEFAULTS = {"input_size": [3, 160, 160], "interpolation": "bilinear", "crop_pct": 0.95, "crop_mode": "center"}


class ResNet(nn.Module):
    """A convolution, a residual block, and a head."""

    def __init__(self, num_classes=1000, in_chans=3, width=8):
        super().__init__()
        self.pretrained_cfg = DEFAULTS | {"mean": [0.5] * in_chans, "std": [0.5] * in_chans, "tag": "r160_in1k"}
        self.num_features = width
        self.conv1 = nn.Conv2d(in_chans, width, 3, stride=4, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.reset_classifier(num_classes)

    def reset_classifier(self, num_classes):
        self.num_classes = num_classes
        self.fc = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()

    def forward(self, x):
        x = self.bn1(self.conv1(x)).relu()
        return self.fc((x + self.conv2(x)).mean((2, 3)))


def create_model(model_name, pretrained=False, **arguments):
    source, _, place = model_name.rpartition("local-dir:")
    if place == model_name:
        model = ResNet(**arguments)
        model.architecture, model.arguments = model_name, arguments
        return model
    assert source == ""
    folder = Path(place)
    config = json.loads((folder / "config.json").read_text())
    if config["architecture"] != "test_resnet":
        raise RuntimeError(f"Unknown model ({config['architecture']})")
    model = create_model(config["architecture"], **{"num_classes": config["num_classes"]} | config["model_args"])
    model.pretrained_cfg |= config["pretrained_cfg"]
    if pretrained:
        tensors = load_file(folder / "model.safetensors")
        same = model.num_classes == config["num_classes"]
        if not same:
            tensors = {name: value for name, value in tensors.items() if not name.startswith("fc.")}
        model.load_state_dict(tensors, strict=same)
    return model
