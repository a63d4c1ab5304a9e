"""timm's preprocessing for evaluation, in Pillow and numpy: timm/data/config.py, transforms_factory.py, transforms.py,
and of torchvision the resizing and cropping that these call."""

import math

import numpy as np
import torch
from PIL import Image

FILTERS = {each.name.lower(): each for each in Image.Resampling}


class ImageNetInfo:
    def index_to_description(self, index):
        return f"thing {index}"


def resolve_data_config(args=None, pretrained_cfg=None, model=None):
    given = {**(pretrained_cfg or model.pretrained_cfg), **(args or {})}
    names = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")
    defaults = ((3, 224, 224), "bicubic", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 0.875, "center")
    return {name: given.get(name) or default for name, default in zip(names, defaults, strict=True)}


def create_transform(input_size, interpolation, mean, std, crop_pct, crop_mode, is_training=False):
    assert not is_training
    sides = tuple(input_size[1:])
    scaled = tuple(math.floor(side / crop_pct) for side in sides)
    resample = FILTERS[interpolation]

    def transform(image):
        if crop_mode == "squash":
            image = image.resize(scaled[::-1], resample)
        elif crop_mode == "border":
            image = keep_ratio(image, scaled, resample, longest=1.0)
        elif scaled[0] == scaled[1]:
            short = min(image.size)
            image = image.resize(tuple(int(scaled[0] * side / short) for side in image.size), resample)
        else:
            image = keep_ratio(image, scaled, resample, longest=0.0)
        fill = [round(255 * value) for value in mean] if crop_mode == "border" else [0] * len(image.getbands())
        pixels = crop(np.asarray(image, np.float32).reshape(*image.size[::-1], -1), sides, fill) / np.float32(255)
        pixels = (pixels - np.array(mean, np.float32)) / np.array(std, np.float32)
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy())

    return transform


def keep_ratio(image, size, resample, longest):
    ratios = image.height / size[0], image.width / size[1]
    ratio = max(ratios) * longest + min(ratios) * (1.0 - longest)
    return image.resize((round(image.width / ratio), round(image.height / ratio)), resample)


def crop(pixels, sides, fill):
    for axis, side in enumerate(sides):
        if (absent := side - pixels.shape[axis]) > 0:
            ends = [(absent // 2, (absent + 1) // 2) if each == axis else (0, 0) for each in range(2)]
            padded = [np.pad(pixels[..., channel], ends, constant_values=colour) for channel, colour in enumerate(fill)]
            pixels = np.stack(padded, axis=-1)
        start = round((pixels.shape[axis] - side) / 2.0)
        pixels = pixels.take(range(start, start + side), axis=axis)
    return pixels
