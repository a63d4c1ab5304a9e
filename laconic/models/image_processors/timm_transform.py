"""The transform of timm for evaluation: the image is resized to 1 / crop_pct of the input, whose centre is cropped."""

import math

from laconic.errors import SourceError
from laconic.models.image_processors.standard_processor import Settings
from laconic.tasks.image_preprocess import ImagePreprocess

FILTERS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}
"""Pillow's filters, by their names in timm."""


def read_timm(settings: Settings) -> ImagePreprocess:
    """The preprocessing that `timm.data.create_transform` makes of what `timm.data.resolve_data_config` says.

    crop_mode: `squash` stretches the image, `border` puts a border around it, and `center` cuts off its ends.
    Raises SourceError for an interpolation that is not known here.
    """
    if settings["interpolation"] not in FILTERS:
        raise SourceError(
            f"pretrained_cfg has the interpolation {settings['interpolation']!r}; expected one of {', '.join(FILTERS)}"
        )
    channels, *sides = settings["input_size"]
    height, width = (math.floor(side / settings["crop_pct"]) for side in sides)
    mode = settings["crop_mode"]
    made = ImagePreprocess(
        channels=channels,
        crop=tuple(sides),
        centre="even",
        mean=tuple(settings["mean"]),
        std=tuple(settings["std"]),
        resample=FILTERS[settings["interpolation"]],
    )
    if mode not in ("squash", "border") and height == width:
        return made.model_copy(update={"shortest_edge": height})
    fit = {"squash": None, "border": "contain"}.get(mode, "cover")
    fill = tuple(round(255 * value) for value in settings["mean"]) if mode == "border" else (0,)
    return made.model_copy(update={"resize": (height, width), "keep_ratio": fit, "fill": fill})
