"""What a generation worker opens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GenerationJob:
    """What a generation worker opens. engine: a generator's name. model, tokenizer: the paths of a graph and of its
    tokenizer's file, which the server has checked against their manifest; manifest: the path of that, and digest: its
    digest then. context: the most tokens of a text. cache_bytes: of the cache of all requests. generation, longest: of
    an encoder-decoder: how it writes, and the most tokens of a source. golden: tokens that the engine must write,
    packed. has_adapters: whether LoRA adapters can be loaded beside the model. prefixes: the file that its prefix cache
    is kept in; empty for none. draft: of a draft model, the fields of a `DraftFile`."""

    engine: str
    model: str
    tokenizer: str
    manifest: str
    digest: str
    context: int
    cache_bytes: int
    threads: int
    compute: str
    generation: Mapping[str, Any] | None = None
    longest: int = 0
    golden: Sequence[Any] = ()
    has_adapters: bool = False
    prefixes: str = ""
    draft: Mapping[str, Any] | None = None
