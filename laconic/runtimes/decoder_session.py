"""A language model with a cache as a session: it runs targets, or writes answers token by token.

The model file reads `input_ids` and `position_ids`, [batch, seq] int64, and the keys and values of earlier tokens as
`past.0`, ..., key and value of each layer in turn, [batch, heads, past, width] float32. It returns the logits, [batch,
seq, vocabulary], and as `present.0`, ... the keys and values with those of the new tokens. That of a vision-language
model reads the features of images too, as `cross.0`, [batch, patches, width] float32, which ids below 0 stand for:
-1 for the first patch; and where rotary positions depend on them, their places. The file of its tower lies beside it.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.errors import RuntimeFailure
from laconic.runtimes.decoder_file import LOGITS, cross_name, find_cache, past_name, present_name, read_file_inputs
from laconic.runtimes.runtime import Kernel, Session
from laconic.tasks.decoder_tensors import (
    IMAGE_FEATURES,
    IMAGE_INPUTS,
    LOG_LIKELIHOODS,
    NEW_TOKENS,
    PLACES,
    POSITION_IDS,
    PROBABILITIES,
    SEQUENCES,
    TOKENS,
    group_probabilities,
    measure_log_likelihoods,
    select_compared,
)
from laconic.tasks.generation_settings import GenerationSettings


class DecoderSession(Session):
    """Runs targets (teacher forcing), or writes them.

    With `position_ids` among the inputs it returns what `LanguageModel` does, for an empty past; without, the tokens
    that it writes greedily after each prompt, as `sequences` [batch, max_new_tokens] int64, padded behind the end
    token; no more than fit into the model's context (max_length). With `new_tokens` it writes so many, to be timed.
    """

    def __init__(
        self,
        decoder: Session,
        model: Path,
        generation: GenerationSettings | None = None,
        tower: Session | None = None,
    ) -> None:
        """model: the decoder's file. generation: without it, the session writes nothing. tower: makes the features of
        images; None for a model that reads none."""
        self.decoder = decoder
        self.tower = tower
        self.generation = generation
        self._cache = find_cache(read_file_inputs(model), "input_ids", model)

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        source = self.encode(inputs)
        if POSITION_IDS in inputs:
            logits = self.decode(ids, inputs[POSITION_IDS], self.make_empty(len(ids)) | source)[LOGITS]
            outputs = {
                PROBABILITIES: group_probabilities(logits) * mask[..., None],
                TOKENS: logits.argmax(axis=-1),
                LOG_LIKELIHOODS: measure_log_likelihoods(logits, ids.clip(min=0)),
            }
            if source:
                outputs[IMAGE_FEATURES] = select_compared(source[cross_name(0)], inputs)
            return outputs
        settings = GenerationSettings.of_length(int(inputs[NEW_TOKENS])) if NEW_TOKENS in inputs else self.generation
        if settings is None:
            raise RuntimeFailure("nothing says how this model writes. Give it position_ids")
        sequences = np.full((len(ids), settings.max_new_tokens), settings.pad_token_id, np.int64)
        # Prompts of one length are written together, so that no row has padding between its tokens.
        lengths = ids.shape[1] - mask[:, ::-1].argmax(axis=1)
        for length in np.unique(lengths):
            rows = np.flatnonzero(lengths == length)
            images = {name: array[rows] for name, array in source.items()}
            written = self._write(ids[rows, :length], settings, images)
            sequences[rows, : written.shape[1]] = written
        return {SEQUENCES: sequences}

    def encode(self, inputs: Mapping[str, Array]) -> Arrays:
        """Return what the decoder reads of images: nothing where it reads none."""
        if self.tower is None:
            return {}
        images = {name: inputs[name] for name in IMAGE_INPUTS if name in inputs}
        (features,) = self.tower.run(images).values()
        return {cross_name(0): features} | {name: images[name] for name in images if name == PLACES}

    def decode(self, ids: Array, places: Array, past: Arrays) -> Arrays:
        """Run the next tokens: the logits, and the keys and values of all tokens so far. past: of earlier ones, and the
        features of images."""
        return self.decoder.run({"input_ids": ids, POSITION_IDS: places, **past})

    def make_empty(self, rows: int) -> Arrays:
        """Return the keys and values of no tokens."""
        return {
            past_name(index): np.zeros((rows, heads, 0, width), np.float32)
            for index, (heads, width) in enumerate(self._cache)
        }

    def kernels(self) -> list[Kernel]:
        return [*(self.tower.kernels() if self.tower else ()), *self.decoder.kernels()]

    def close(self) -> None:
        if self.tower is not None:
            self.tower.close()
        self.decoder.close()

    def _write(self, prompts: Array, settings: GenerationSettings, source: Arrays) -> Array:
        """Write what follows prompts of one length: [batch, tokens] int64, at most max_new_tokens. source: the features
        of their images."""
        rows, length = prompts.shape
        room = settings.max_new_tokens if settings.max_length is None else settings.max_length - length
        most = min(settings.max_new_tokens, room)
        written = np.full((rows, 1), settings.decoder_start_token_id, np.int64)
        ended = np.zeros(rows, bool)
        past, ids = self.make_empty(rows), prompts
        while written.shape[1] <= most and not ended.all():
            stop = length + written.shape[1] - 1
            places = np.broadcast_to(np.arange(stop - ids.shape[1], stop), ids.shape)
            outputs = self.decode(ids, np.ascontiguousarray(places), past | source)
            tokens = settings.choose(outputs[LOGITS][:, -1], written)
            tokens[ended] = settings.pad_token_id
            ended |= np.isin(tokens, settings.eos_token_id)
            past = {past_name(index): outputs[present_name(index)] for index in range(len(self._cache))}
            ids = tokens[:, None]
            written = np.concatenate([written, ids], axis=1)
        if most < settings.max_new_tokens and settings.eos_token_id:  # so that padding is not read as an answer
            last = np.where(ended, settings.pad_token_id, settings.eos_token_id[0])
            written = np.concatenate([written, last[:, None]], axis=1)
        return written[:, 1:]
