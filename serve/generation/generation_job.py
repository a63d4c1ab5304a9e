"""What a generation worker opens."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GenerationJob:
    """What a generation worker opens. engine: a generator's name. model, tokenizer: the paths of a graph and of its
    tokenizer's file, which the server has checked against their manifest; manifest: the path of that, and digest: its
    digest then. context: the most tokens of a text. cache_bytes: of the cache of all requests."""

    engine: str
    model: str
    tokenizer: str
    manifest: str
    digest: str
    context: int
    cache_bytes: int
    threads: int
    compute: str
