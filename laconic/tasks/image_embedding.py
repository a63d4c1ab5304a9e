"""Image embedding: an image to a vector."""

from collections.abc import Mapping
from typing import Any

from laconic.tasks.embedding import Embedding, has_image_config
from laconic.tasks.image import ImageTask


class ImageEmbedding(Embedding, ImageTask):
    """The vector is the pooled output of an encoder of images, without a head."""

    name = "image-embedding"
    auto_class = "AutoModel"
    architectures = ("Model",)

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        return has_image_config(config)
