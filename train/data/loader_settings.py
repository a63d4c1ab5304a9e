"""Settings of the loading of batches."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from laconic.config import Strict


class LoaderSettings(Strict):
    """How batches are loaded. No setting changes a batch, but for `image_backend`, or the random numbers of training.

    workers: processes that build batches; their number is found by measuring by default. pin_memory: page-locked memory
    for the batches, from which a GPU copies while it computes; by default where there is a GPU. prefetch: batches that
    each worker has ready. cache: where decoded images are kept, so that each is decoded once. image_backend: what
    decodes and resizes the images of training; with "dali" their pixels differ a little from the checkpoint's own.
    """

    renamed: ClassVar[Mapping[str, str]] = {"pin": "pin_memory"}

    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    pin_memory: bool | None = None
    prefetch: int = Field(default=2, ge=1)
    cache: Literal["none", "memory", "disk"] = "none"
    image_backend: Literal["pillow", "dali"] = "pillow"

    @model_validator(mode="after")
    def _without_workers(self) -> Self:
        if self.image_backend == "dali" and (self.workers not in ("auto", 0) or self.cache != "none"):
            raise ValueError(
                "DALI decodes all images of a batch in threads of its own, each time: leave workers and cache out"
            )
        return self
