"""llama.cpp on the CPU: a file in GGUF beside a language model's graph, in the arithmetic int8-dynamic."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.errors import RuntimeFailure
from laconic.runtimes.decoder_file import LOGITS, PAST, PRESENT, gguf_of, past_name
from laconic.runtimes.llamacpp_library import TEXTS, VERSION, LlamaModel, Reading
from laconic.runtimes.runtime import Compute, Runtime, Session

HEADROOM = 128
"""Tokens by which each text can grow before the cache is opened anew."""


class LlamaCppSession(Session):
    """Reads the next tokens of rows behind those of its last call, whose keys and values stay in llama.cpp: what goes
    from call to call in their place has their length and no content."""

    def __init__(self, model: LlamaModel) -> None:
        self._model = model
        self._capacity = 0
        self._ids: Array = np.empty((0, 0), np.int64)

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        ids, past = inputs["input_ids"], inputs[past_name(0)].shape[2]
        if past and self._ids.shape != (len(ids), past):
            raise RuntimeFailure("llama.cpp has other texts in its cache than those that should go on")
        if len(ids) > TEXTS:
            raise RuntimeFailure(f"{len(ids)} texts are more than llama.cpp reads at once here, which are {TEXTS}")
        self._ids = np.concatenate([self._ids, ids], axis=1) if past else ids
        rows, width = self._ids.shape
        read = past
        if rows * width > self._capacity:
            self._capacity = rows * (width + HEADROOM)
            self._model.open_cache(self._capacity)
            read = 0
        if not read:
            for row in range(TEXTS):
                self._model.forget(row)
        logits = np.empty((rows, width - read, self._model.vocabulary), np.float32)
        for pieces in cut_batches(rows, read, width):
            readings = [
                Reading(row, self._ids[row, start:stop].tolist(), start, stop - start) for row, start, stop in pieces
            ]
            for (row, start, stop), scores in zip(pieces, self._model.read(readings), strict=True):
                logits[row, start - read : stop - read] = scores
        kept = np.empty((rows, 1, width, 0), np.float32)
        presents = {name.replace(PAST, PRESENT, 1): kept for name in inputs if name.startswith(PAST)}
        return {LOGITS: logits[:, past - read :], **presents}

    def close(self) -> None:
        self._model.close()


def cut_batches(rows: int, start: int, stop: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cut the tokens of rows, from one place to another, into batches of TEXTS tokens at most. Yield the pieces of
    each: row, start, stop."""
    length = min(stop - start, TEXTS)
    pieces = [(row, place, min(place + length, stop)) for row in range(rows) for place in range(start, stop, length)]
    together = max(1, TEXTS // length)
    for first in range(0, len(pieces), together):
        yield pieces[first : first + together]


class LlamaCpp(Runtime):
    """llama.cpp. It rounds the inputs of products with stored weights to INT8, 32 numbers with one scale, and keeps
    keys and values in FP16."""

    name = "llamacpp"
    package = "xllamacpp"

    def version(self) -> str:
        return VERSION

    def computes(self) -> tuple[Compute, ...]:
        return ("int8-dynamic",)

    def has_int8_dynamic(self) -> bool:
        return True

    def open(self, model: Path, *, threads: int = 1, compute: Compute = "int8-dynamic") -> Session:
        return LlamaCppSession(LlamaModel(gguf_of(model), threads=threads))
