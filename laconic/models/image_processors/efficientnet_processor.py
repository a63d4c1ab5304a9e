"""EfficientNet's image processor: values from -1 on, and for classifiers a second division by the deviation."""

from laconic.models.image_processors.standard_processor import Settings, read_standard
from laconic.tasks.image_preprocess import ImagePreprocess


def read_efficientnet(settings: Settings, *, channels: int) -> ImagePreprocess:
    """rescale_offset subtracts 1 before the mean; include_top divides by the deviation again, normalized or not."""
    made = read_standard(settings, channels=channels)
    mean, std = made.mean, made.std
    if settings.get("rescale_offset") and settings.get("do_rescale"):
        mean = tuple(value + 1 for value in mean)
    if settings.get("include_top"):
        again = tuple(settings["image_std"])
        std = tuple(value * other for value, other in zip(std * (len(again) // len(std)), again, strict=True))
    return made.model_copy(update={"mean": mean, "std": std})
