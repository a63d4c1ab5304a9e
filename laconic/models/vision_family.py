"""What differs between families of vision-language models: their towers, and the positions of their tokens."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class VisionFamily:
    """What differs between vision-language models. body: the name of their language model.

    pixels, places and position_ids are as of `VisionLanguageModel`; most families read no places.
    """

    body: str

    def prepare(self, model: Any) -> None:
        """Do what is to be done with a model first."""

    def measure_side(self, config: Any) -> int:
        """Return the side of the frames that a tower reads, in pixels. config: of the tower."""
        return int(config.image_size)

    def encode(self, model: Any, config: Any, pixels: Tensor, places: Tensor | None) -> tuple[Tensor, Tensor]:
        """Encode images. Return what the language model reads, and what is compared of that: [batch, patches, width]
        both."""
        raise NotImplementedError

    def position(self, position_ids: Tensor | None, input_ids: Tensor, places: Tensor | None) -> Any:
        """Return the positions of tokens as the language model takes them."""
        return position_ids

    def select_images(
        self, model: Any, config: Any, ids: Tensor, pixels: Tensor, places: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the images of prompts as transformers reads them; nothing where these have none. ids: their tokens,
        [batch, seq]."""
        raise NotImplementedError
