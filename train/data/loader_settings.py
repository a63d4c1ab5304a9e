"""Settings of the loading of batches."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from laconic.config import Strict


class LoaderSettings(Strict):
    """How batches are loaded. No setting changes a batch, or the random numbers of training.

    workers: processes that build batches; their number is found by measuring by default. pin_memory: page-locked memory
    for the batches, from which a GPU copies while it computes; by default where there is a GPU. prefetch: batches that
    each worker has ready. cache: where decoded images are kept, so that each is decoded once.
    """

    renamed: ClassVar[Mapping[str, str]] = {"pin": "pin_memory"}

    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    pin_memory: bool | None = None
    prefetch: int = Field(default=2, ge=1)
    cache: Literal["none", "memory", "disk"] = "none"
