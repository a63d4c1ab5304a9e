"""The image files of a sample: as rows of files and requests hold them, and made to fit the place of another."""

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image as Pillow

from laconic.errors import InputError
from laconic.tasks.image_preprocess import open_image
from laconic.tasks.image_text import Image

IMAGE, IMAGES = "image", "images"
"""The columns of an image, and of a list of several, and their keys in a sample."""


def list_images(chat: Any) -> list[Any]:
    """List the images of a chat, as they are given. Raises InputError."""
    if not isinstance(chat, Mapping):
        return []
    image, images = chat.get(IMAGE), chat.get(IMAGES)
    if image is not None and images is not None:
        raise InputError(f"there are both {IMAGE!r} and {IMAGES!r}. Give one of them")
    if not isinstance(images, list | tuple | None):
        raise InputError(f"{IMAGES!r} must be a list, not {type(images).__name__}")
    return list(images or ()) if image is None else [image]


def find_image(value: Any, folder: Path) -> Image:
    """Find the image that a row holds: the content of a file, or a path relative to `folder`. Raises InputError."""
    if isinstance(value, Mapping):  # how Parquet files of Hugging Face hold files
        value = value.get("bytes")
    if isinstance(value, str):
        path = folder / value
        if not path.is_file():
            raise InputError(f"there is no image {value!r} (looked for {path})")
        return path
    return check_image(value)


def decode_image(value: Any) -> Image:
    """Return the image that a request holds: a file in base64. Raises InputError."""
    if not isinstance(value, str):
        return check_image(value)
    try:
        return base64.b64decode(value.partition("base64,")[2] or value, validate=True)
    except ValueError:  # binascii.Error is one, and so is what other than ASCII raises
        raise InputError("an image in JSON must be the file's bytes in base64") from None


def check_image(value: Any) -> Image:
    """Return an image as it is. Raises InputError for what is no content of a file and no path."""
    if not isinstance(value, bytes | Path):
        raise InputError(f"an image must be the content of a file, not {type(value).__name__}")
    return value


def fit_image(image: Image, shape: Image) -> bytes:
    """Return an image stretched to the size of another one, as the content of a file. Raises InputError."""
    return write_png(open_image(image).convert("RGB").resize(open_image(shape).size))


def write_png(image: Pillow.Image) -> bytes:
    """Return the content of a PNG file of an image."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
