"""The feature extractor and the characters of a speech checkpoint, and the proof that they work as in transformers."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from pydantic import ValidationError

from laconic.errors import SourceError
from laconic.models.model_folder import read_source_json
from laconic.models.speech import SpeechModel, ignores_padding, split_convolutions
from laconic.tasks.audio_preprocess import AudioPreprocess, LogMelPreprocess
from laconic.tasks.ctc_vocabulary import CtcVocabulary
from laconic.tasks.preprocessing import Preprocessing

SETTINGS = "preprocessor_config.json"

SAMPLE_ERROR = 1e-5
"""The largest difference of a normalized sample. Rounding alone differs by 1e-6."""
FEATURE_ERROR = 1e-4
"""The largest difference of a spectrogram. The FFT of torch in FP32 differs by up to 5e-5 from that in FP64."""


def read_speech(folder: Path, module: SpeechModel, labels: tuple[str, ...], *, writes: bool) -> Preprocessing:
    """Read the preprocessing of a checkpoint that reads waveforms. writes: whether it writes what is said.

    Raises SourceError where a part is missing, or transformers reads it in another way.
    """
    config = module.model.config
    audio, masks = read_audio_preprocess(folder, config)
    return Preprocessing(
        audio=audio,
        masks_audio=masks and ignores_padding(module, audio),
        labels=labels,
        characters=read_characters(folder, config.vocab_size) if writes else None,
    )


def read_audio_preprocess(folder: Path, config: Any) -> tuple[AudioPreprocess, bool]:
    """Read the preprocessing of a checkpoint, checked against transformers', and whether the model takes a mask.

    config: of the model.
    Raises SourceError for a folder without it, and for one that transformers reads in another way.
    """
    extractor = open_feature_extractor(folder)
    made = AudioPreprocess(
        sampling_rate=extractor.sampling_rate,
        normalize=bool(getattr(extractor, "do_normalize", False)),
        convolutions=tuple(chain(*split_convolutions(config))),
    )
    for waveform in make_probes(made.sampling_rate):
        difference = measure_error(extractor, made, waveform, "input_values")
        if difference > SAMPLE_ERROR:
            known = "Models that read waveforms are known, as wav2vec 2.0, HuBERT and WavLM"
            raise make_unknown(folder, extractor, difference, known)
    return made, bool(getattr(extractor, "return_attention_mask", False))


def open_feature_extractor(folder: Path) -> Any:
    """Open the feature extractor of transformers. Raises SourceError for a folder without one, or of an unknown
    type."""
    read_source_json(folder / SETTINGS)
    try:
        return transformers.AutoFeatureExtractor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the type is of a later version, or of no transformers
        raise SourceError(
            f"transformers does not read {folder / SETTINGS}, so nothing shows that recordings would be prepared as "
            f"the model needs them: {type(error).__name__}, {' '.join(str(error).split())}"
        ) from error


def read_log_mel(folder: Path, config: Any) -> LogMelPreprocess:
    """Read the preprocessing of a checkpoint, checked against transformers' and the model. config: of the model.

    Raises SourceError for a folder without it, for one that transformers reads in another way, and for one that is not
    of this model.
    """
    extractor = open_feature_extractor(folder)
    names = LogMelPreprocess.model_fields
    try:
        made = LogMelPreprocess(**{name: getattr(extractor, name) for name in names if hasattr(extractor, name)})
    except ValidationError as error:
        first = error.errors()[0]
        raise SourceError(
            f"{folder / SETTINGS} sets {first['loc'][0]} to {first['input']!r}: {first['msg'].lower()}"
        ) from None
    probes = make_probes(made.sampling_rate)
    difference = max(measure_error(extractor, made, waveform, "input_features") for waveform in probes)
    if not (isinstance(extractor, transformers.WhisperFeatureExtractor) and difference <= FEATURE_ERROR):
        known = "Encoder-decoders that read the log-mel spectrograms of WhisperFeatureExtractor are known"
        raise make_unknown(folder, extractor, difference, known)
    expected = (config.num_mel_bins, 2 * config.max_source_positions)  # one convolution has a stride of two
    if (made.feature_size, made.frames) != expected:
        raise SourceError(
            f"{folder / SETTINGS} makes {made.feature_size} bands and {made.frames} frames of a recording, and the "
            f"model reads {expected[0]} and {expected[1]}. Copy the folder again: the two are of different models"
        )
    return made


def make_unknown(folder: Path, extractor: Any, difference: float, known: str) -> SourceError:
    """Make the error for a feature extractor that prepares recordings in another way. known: which ones are known."""
    described = f"values differ by up to {difference:.3g}" if np.isfinite(difference) else "the input differs"
    return SourceError(
        f"{folder / SETTINGS} is for {type(extractor).__name__}, whose rules Laconic does not know: {described}. "
        f"{known}; give others with --builder, and arrays in .npz, prepared by your own code"
    )


def make_probes(rate: int) -> list[Any]:
    """Make recordings by which preprocessing is compared, [samples] float32: silence, and noise off zero."""
    rng = np.random.default_rng(0)
    noise = 0.1 * rng.standard_normal(rate // 2).astype(np.float32) + np.float32(0.05)
    return [np.zeros(rate // 4, np.float32), noise, 0.001 * noise[: rate // 3]]


def measure_error(extractor: Any, made: AudioPreprocess | LogMelPreprocess, waveform: Any, key: str) -> float:
    """Measure the largest difference of a number between a feature extractor of transformers and ours; infinite for
    inputs of different shapes. key: of the extractor's input."""
    try:
        expected = np.asarray(extractor(waveform, sampling_rate=made.sampling_rate, return_tensors="np")[key][0])
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, RuntimeError):  # it makes other inputs
        return float("inf")
    ours = made.apply(waveform, made.sampling_rate)
    return float(np.abs(expected - ours).max()) if expected.shape == ours.shape else float("inf")


def read_characters(folder: Path, size: int) -> CtcVocabulary:
    """Read the vocabulary of a checkpoint that writes, checked against transformers' tokenizer. size: tokens of the
    model.

    Raises SourceError for a folder without it, and for one that transformers reads in another way.
    """
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        names = {index: token for token, index in tokenizer.get_vocab().items()}
        made = CtcVocabulary(
            tokens=tuple(names.get(index, "") for index in range(size)),
            blank=tokenizer.pad_token_id,
            delimiter=tokenizer.word_delimiter_token,
            upper=bool(tokenizer.do_lower_case),
            unknown=tokenizer.unk_token_id,
        )
    except Exception as error:  # the type is of a later version, or of no transformers
        raise SourceError(
            f"the vocabulary of characters in {folder} does not read: {type(error).__name__}, "
            f"{' '.join(str(error).split())}. Copy the folder again, with vocab.json and tokenizer_config.json"
        ) from error
    rng = np.random.default_rng(0)
    for length in (1, 20, 200):
        ids = rng.integers(0, size, length).repeat(rng.integers(1, 4, length)).tolist()
        if (expected := tokenizer.decode(ids)) != made.decode(ids):
            raise SourceError(
                f"the tokenizer in {folder} writes {expected[:60]!r} where its vocabulary says "
                f"{made.decode(ids)[:60]!r}: {type(tokenizer).__name__} has rules that Laconic does not know. Give "
                f"the model with --builder"
            )
    return made
