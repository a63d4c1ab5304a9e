"""An encoder-decoder as a session: its encoder runs once, its decoder token by token, with a cache.

The model file is the decoder's; the encoder's lies beside it. The decoder reads the outputs of the encoder, in their
order as `cross.0`, `cross.1`, ..., the keys and values of cross-attention among them; and the keys and values of the
target's earlier tokens, as `past.0`, ..., key and value of each layer in turn. It returns the logits, and as
`present.0`, ... the keys and values with those of the new tokens.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.errors import RuntimeFailure
from laconic.runtimes.decoder_file import (
    CROSS,
    LOGITS,
    cross_name,
    find_cache,
    past_name,
    present_name,
    read_file_inputs,
)
from laconic.runtimes.runtime import Kernel, Session
from laconic.tasks.decoder_tensors import (
    DECODER_ATTENTION_MASK,
    DECODER_INPUT_IDS,
    NEW_TOKENS,
    PROBABILITIES,
    SEQUENCES,
    TARGET_INPUTS,
    TOKENS,
    group_probabilities,
)
from laconic.tasks.generation_settings import GenerationSettings

NOT_SOURCE = frozenset({*TARGET_INPUTS, NEW_TOKENS})
"""The inputs of a run that the encoder does not read."""


class EncoderDecoderSession(Session):
    """Runs targets (teacher forcing), or writes them.

    With `decoder_input_ids` among the inputs it returns what `EncoderDecoder` does, for an empty past; without, the
    tokens that it writes greedily, as `sequences` [batch, max_new_tokens] int64, padded behind the end token. All rows
    of a batch are written together, until the last has ended. With `new_tokens` it writes so many, to be timed.
    """

    def __init__(
        self, encoder: Session, decoder: Session, model: Path, generation: GenerationSettings | None = None
    ) -> None:
        """model: the decoder's file. generation: without it, the session writes nothing."""
        self.encoder = encoder
        self.decoder = decoder
        self.generation = generation
        self._inputs = read_file_inputs(model)
        self._cache = find_cache(self._inputs, DECODER_INPUT_IDS, model)

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        encoded = self.encode({name: inputs[name] for name in inputs if name not in NOT_SOURCE})
        if DECODER_INPUT_IDS in inputs:
            logits = self.decode(encoded, inputs[DECODER_INPUT_IDS])[LOGITS]
            filled = inputs[DECODER_ATTENTION_MASK][..., None]
            return {PROBABILITIES: group_probabilities(logits) * filled, TOKENS: logits.argmax(axis=-1)}
        settings = GenerationSettings.of_length(int(inputs[NEW_TOKENS])) if NEW_TOKENS in inputs else self.generation
        if settings is None:
            raise RuntimeFailure("nothing says how this model writes. Give it decoder_input_ids")
        return {SEQUENCES: self._write(encoded, settings)}

    def encode(self, source: Arrays) -> Arrays:
        """Return what the decoder may read of a source: the source itself, and what the encoder makes of it."""
        # By order: OpenVINO may give an output another of its names.
        results = {cross_name(index): array for index, array in enumerate(self.encoder.run(source).values())}
        return results | source

    def decode(self, encoded: Arrays, ids: Array, past: Arrays | None = None) -> Arrays:
        """Run the decoder on the next tokens: the logits, and the keys and values of all tokens so far.

        encoded: what `encode` returned. ids: [batch, tokens]. past: keys and values of earlier tokens; none where None.
        """
        inputs = {**encoded, **(self._empty(len(ids)) if past is None else past), DECODER_INPUT_IDS: ids}
        try:
            return self.decoder.run({each.name: inputs[each.name] for each in self._inputs})
        except KeyError as error:
            raise RuntimeFailure(f"the decoder and its encoder do not fit: {error} is missing") from None

    def kernels(self) -> list[Kernel]:
        return [*self.encoder.kernels(), *self.decoder.kernels()]

    def close(self) -> None:
        self.encoder.close()
        self.decoder.close()

    def _write(self, encoded: Arrays, settings: GenerationSettings) -> Array:
        """Write the answers, [batch, max_new_tokens] int64."""
        rows = len(next(array for name, array in encoded.items() if not name.startswith(CROSS)))
        written = np.full((rows, 1), settings.decoder_start_token_id, np.int64)
        ended = np.zeros(rows, bool)
        past: Arrays | None = None
        read = 0
        while written.shape[1] <= settings.max_new_tokens and not ended.all():
            forced = settings.find_forced(written.shape[1] - 1)
            if forced is None:
                outputs = self.decode(encoded, written[:, read:], past)
                tokens = settings.choose(outputs[LOGITS][:, -1], written)
                tokens[ended] = settings.pad_token_id
                ended |= np.isin(tokens, settings.eos_token_id)
                past = {past_name(index): outputs[present_name(index)] for index in range(len(self._cache))}
                read = written.shape[1]
            else:  # read with the token behind it
                tokens = np.full(rows, forced, np.int64)
            written = np.concatenate([written, tokens[:, None]], axis=1)
        sequences = np.full((rows, settings.max_new_tokens), settings.pad_token_id, np.int64)
        sequences[:, : written.shape[1] - 1] = written[:, 1:]
        return sequences

    def _empty(self, rows: int) -> Arrays:
        """Return the keys and values of no tokens."""
        return {
            past_name(index): np.zeros((rows, heads, 0, width), np.float32)
            for index, (heads, width) in enumerate(self._cache)
        }
