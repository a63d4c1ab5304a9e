"""The feature extractor and the tokenizer of a checkpoint that writes what is said, and the proof that recordings are
prepared as in transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from pydantic import ValidationError
from torch import Tensor, zeros

from laconic.errors import SourceError
from laconic.models.audio_processor import SETTINGS, make_probes, open_feature_extractor
from laconic.models.encoder_decoder import find_cache_shape, read_generation
from laconic.models.processors import read_tokenizer
from laconic.models.speech_writer import SpeechWriter
from laconic.models.whisper_prompt import read_prompt
from laconic.tasks.log_mel import LogMelPreprocess
from laconic.tasks.preprocessing import Preprocessing

FEATURE_ERROR = 1e-4
"""The largest difference of a feature. The FFT of torch in FP32 differs by up to 5e-5 from that in FP64."""
VOCABULARIES = ("tokenizer.json", "vocab.json")


def read_speech_writer(folder: Path, module: SpeechWriter) -> Preprocessing:
    """The preprocessing of a checkpoint that writes what is said.

    Raises SourceError where a part is missing, or transformers reads it in another way.
    """
    model: Any = module.model
    if not any((folder / name).is_file() for name in VOCABULARIES):
        raise SourceError(
            f"{folder} has no tokenizer.json, which makes a text of what the model writes. Copy the folder again, with "
            f"its tokenizer"
        )
    log_mel = read_log_mel(folder, model.config)
    tokenizer, pad_id, _ = read_tokenizer(folder, model.config, special=False)
    prompt = read_prompt(model.config, model.generation_config, folder)
    generation = read_generation(model, pad_id, folder, prompt)
    source: Mapping[str, Tensor] = {"input_features": zeros(1, log_mel.feature_size, log_mel.frames)}
    shape = find_cache_shape(model, source, generation.decoder_start_token_id, folder)
    return Preprocessing(tokenizer=tokenizer, log_mel=log_mel, pad_id=pad_id, generation=generation, cache_shape=shape)


def read_log_mel(folder: Path, config: Any) -> LogMelPreprocess:
    """The preprocessing of a checkpoint, checked against transformers' and the model. config: of the model.

    Raises SourceError for a folder without it, for one that transformers reads in another way, and for one that is not
    of this model.
    """
    own = open_feature_extractor(folder)
    names = LogMelPreprocess.model_fields
    try:
        made = LogMelPreprocess(**{name: getattr(own, name) for name in names if hasattr(own, name)})
    except ValidationError as error:
        first = error.errors()[0]
        raise SourceError(
            f"{folder / SETTINGS} sets {first['loc'][0]} to {first['input']!r}: {first['msg'].lower()}"
        ) from None
    difference = max(measure_difference(own, made, waveform) for waveform in make_probes(made.sampling_rate))
    if not difference <= FEATURE_ERROR:
        described = f"values differ by up to {difference:.3g}" if np.isfinite(difference) else "the input differs"
        raise SourceError(
            f"{folder / SETTINGS} is for {type(own).__name__}, whose rules Laconic does not know: {described}. "
            f"Encoder-decoders that read the log-mel spectrograms of WhisperFeatureExtractor are known; give others "
            f"with --builder, and arrays in .npz, prepared by your own code"
        )
    wanted = (config.num_mel_bins, 2 * config.max_source_positions)  # one convolution has a stride of two
    if (made.feature_size, made.frames) != wanted:
        raise SourceError(
            f"{folder / SETTINGS} makes {made.feature_size} bands and {made.frames} frames of a recording, and the "
            f"model reads {wanted[0]} and {wanted[1]}. Copy the folder again: the two are of different models"
        )
    return made


def measure_difference(own: Any, made: LogMelPreprocess, waveform: Any) -> float:
    """The largest difference of a feature between a feature extractor of transformers and ours; infinite for inputs of
    different shapes."""
    if not isinstance(own, transformers.WhisperFeatureExtractor):
        return float("inf")
    found = np.asarray(own(waveform, sampling_rate=made.sampling_rate, return_tensors="np")["input_features"][0])
    ours = made.apply(waveform, made.sampling_rate)
    return float(np.abs(found - ours).max()) if found.shape == ours.shape else float("inf")
