"""Opening a model file as a session, whatever it is: a plain graph, a language model, with a tower of images or
without, or a decoder with an encoder."""

from collections.abc import Callable, Sequence
from pathlib import Path

from laconic.runtimes.decoder_file import encoder_of, is_language_model
from laconic.runtimes.decoder_session import DecoderSession
from laconic.runtimes.encoder_decoder_session import EncoderDecoderSession
from laconic.runtimes.runtime import Session
from laconic.tasks.generation_settings import GenerationSettings


def open_model(
    model: Path, open_file: Callable[[Path], Session], generation: GenerationSettings | None = None
) -> Session:
    """Open a model file, and the encoder beside it if there is one. open_file: opens one file in an engine. generation:
    how the model writes; without it, it runs targets alone."""
    return open_models(model, lambda path: [open_file(path)], generation)[0]


def open_models(
    model: Path, open_many: Callable[[Path], Sequence[Session]], generation: GenerationSettings | None = None
) -> Sequence[Session]:
    """Open a model file, and the encoder beside it if there is one, as several sessions. open_many: opens one file in
    an engine as so many."""
    encoder, is_language = encoder_of(model), is_language_model(model)
    if is_language and encoder.is_file():
        towers = zip(open_many(encoder), open_many(model), strict=True)
        return [DecoderSession(session, model, generation, tower) for tower, session in towers]
    if encoder.is_file():
        pairs = zip(open_many(encoder), open_many(model), strict=True)
        return [EncoderDecoderSession(first, second, model, generation) for first, second in pairs]
    if is_language:
        return [DecoderSession(session, model, generation) for session in open_many(model)]
    return open_many(model)
