"""Encoder-decoder models of transformers that write a text: T5, BART and their relatives, and Whisper."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from laconic.errors import SourceError
from laconic.models.decoder_cache import describe_logits, make_cache
from laconic.models.pretrained import WrappedModel, WritingModel, quiet
from laconic.tasks.decoder_tensors import GROUPS, OUTPUTS, CacheShape
from laconic.tasks.generation_settings import (
    LONGEST,
    UNSTATED_LENGTH,
    GenerationSettings,
    Prompt,
    TimestampSettings,
    as_ids,
)

NEUTRAL = {"encoder_repetition_penalty": 1.0, "guidance_scale": 1.0, "encoder_no_repeat_ngram_size": 0}
UNSUPPORTED = (
    *NEUTRAL, "bad_words_ids", "sequence_bias", "exponential_decay_length_penalty", "stop_strings", "max_time",
    "penalty_alpha", "dola_layers", "constraints", "force_words_ids", "watermarking_config", "forced_decoder_ids",
)  # fmt: skip
"""Settings of generation_config.json that would change a greedy answer, and that `GenerationSettings` lacks."""


class EncoderDecoder(WrappedModel, WritingModel):
    """The distributions of the next token after each token of a target, and the likeliest ones.

    input_ids, attention_mask: the source, [batch, seq] int64. decoder_input_ids, decoder_attention_mask: the target
    behind the start token, [batch, target] int64; the mask tells its padding, on the right. past: the keys and values
    of the decoder's self-attention for the target's earlier tokens, [batch, 2 layers, heads, past, width] float32, key
    and value of each layer in turn.

    With an empty past, all tokens of a target run at once (teacher forcing); with one, the next tokens alone. Returns
    `probabilities`, [batch, target, groups] float32, summed over groups of tokens, zeros at padding; and `tokens`,
    [batch, target] int64.
    """

    def logits(self, past_key_values: EncoderDecoderCache | None = None, **inputs: Tensor) -> Tensor:
        """Return the logits of the token after each of the target's, [batch, target, vocabulary]. inputs: the source
        and `decoder_input_ids`. past_key_values: of earlier tokens; without it nothing is kept for later ones."""
        model: Any = self.model
        use_cache = past_key_values is not None
        logits: Tensor = model(**inputs, past_key_values=past_key_values, use_cache=use_cache).logits
        return logits

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        decoder_input_ids: Tensor,
        decoder_attention_mask: Tensor,
        past: Tensor,
    ) -> dict[str, Tensor]:
        logits = self.logits(
            EncoderDecoderCache(make_cache(past), DynamicCache()),
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
        )
        return dict(zip(OUTPUTS, describe_logits(logits, decoder_attention_mask, GROUPS), strict=True))

    @torch.inference_mode()
    def generate(self, source: Mapping[str, Tensor], generation: GenerationSettings) -> Tensor:
        """Return the greedy answers of transformers, without the start token: [batch, tokens] int64, padded on the
        right. source: what the encoder reads, by name."""
        model: Any = self.model
        settings = select_settings(generation)
        with quiet():
            written: Tensor = model.generate(**source, num_beams=1, do_sample=False, use_cache=True, **settings)
        return written[:, 1:]


class SpeechWriter(EncoderDecoder):
    """`EncoderDecoder` for a source of spectrograms: input_features, [batch, bands, frames] float32.

    Neither masks parts of the input (SpecAugment) nor skips layers (LayerDrop) in training: both draw random numbers
    that a resumed or a simulated step would not repeat.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        whole: Any = model
        whole.config.apply_spec_augment = False
        parts: Any = (whole.get_encoder(), whole.get_decoder())
        for part in parts:
            part.layerdrop = 0.0

    def forward(  # type: ignore[override]  # the source is another
        self, input_features: Tensor, decoder_input_ids: Tensor, decoder_attention_mask: Tensor, past: Tensor
    ) -> dict[str, Tensor]:
        inputs = {"input_features": input_features, "decoder_input_ids": decoder_input_ids}
        logits = self.logits(EncoderDecoderCache(make_cache(past), DynamicCache()), **inputs)
        return dict(zip(OUTPUTS, describe_logits(logits, decoder_attention_mask, GROUPS), strict=True))

    @torch.inference_mode()
    def generate(self, source: Mapping[str, Tensor], generation: GenerationSettings) -> Tensor:
        """Return the greedy answers of transformers, with language and forced tokens, without the start token: [batch,
        tokens] int64, padded on the right."""
        model: Any = self.model
        encoded = model.get_encoder()(**source)
        written = torch.full((len(encoded[0]), 1), generation.decoder_start_token_id)
        if generation.languages:
            languages = torch.tensor(generation.languages)
            logits = model(encoder_outputs=encoded, decoder_input_ids=written, use_cache=False).logits[:, -1]
            written = torch.cat([written, languages[logits[:, languages].argmax(dim=1, keepdim=True)]], dim=1)
        forced = torch.tensor(generation.forced_decoder_ids, dtype=torch.int64).expand(len(written), -1)
        written = torch.cat([written, forced], dim=1)
        settings = select_settings(generation) | {"max_new_tokens": generation.max_new_tokens - generation.begin}
        with quiet():  # the method of Whisper would cut recordings into parts, and make the prompt itself
            answers: Tensor = GenerationMixin.generate(
                model, encoder_outputs=encoded, decoder_input_ids=written, num_beams=1, do_sample=False, use_cache=True,
                **settings,
            )  # fmt: skip
        return answers[:, 1:]


def select_settings(generation: GenerationSettings) -> dict[str, Any]:
    """Return the settings that transformers is told to write greedily, but for the tokens before a text."""
    excluded = {"num_beams", "do_sample", "languages", "forced_decoder_ids", "timestamps"}
    settings = generation.model_dump(mode="json", exclude=excluded)
    # An empty list means none; transformers takes some of them for a setting.
    return {name: value for name, value in settings.items() if value != []}


def find_cache_shape(model: Any, source: Mapping[str, Tensor], start: int, origin: Path) -> CacheShape:
    """Find the shape of the cache of a decoder's self-attention, from one run. source: what the encoder reads, of one
    sample. start: a token.

    Raises SourceError for a model that keeps something else, or other shapes in its layers.
    """
    ids = torch.tensor([[start, start]])
    try:
        with torch.inference_mode():
            kept = model(**source, decoder_input_ids=ids, use_cache=True).past_key_values
        layers = kept.self_attention_cache.layers
        shapes = {tuple(each.shape) for layer in layers for each in (layer.keys, layer.values)}
    except Exception as error:  # whatever code of a model makes of it
        raise SourceError(
            f"{origin} holds a {type(model).__name__}, which does not run with a cache as T5 and BART do: "
            f"{type(error).__name__}, {' '.join(str(error).split())[:200]}. Try --task text-embedding for its encoder"
        ) from error
    if len(shapes) != 1 or len(shape := next(iter(shapes))) != 4 or shape[2] != ids.shape[1]:
        raise SourceError(
            f"{origin} holds a {type(model).__name__}, whose layers keep tensors of the shapes {sorted(shapes)}; "
            f"expected [batch, heads, tokens, width] in each. Try --task text-embedding for its encoder"
        )
    return 2 * len(layers), shape[1], shape[3]


def read_generation(model: Any, pad_id: int, origin: Path, prompt: Prompt | None = None) -> GenerationSettings:
    """Read the settings of generation of a model of transformers, from its generation_config.json and its config.json.

    prompt: of a model that begins with one, in the place of the setting forced_decoder_ids.
    Raises SourceError for settings that would change greedy answers, and that are not implemented.
    """
    content = model.generation_config.to_dict()
    settings = {name: value for name, value in content.items() if value is not None}
    if prompt is not None:
        settings.pop("forced_decoder_ids", None)
    if refused := [name for name in UNSUPPORTED if settings.get(name) and settings[name] != NEUTRAL.get(name)]:
        raise SourceError(
            f"generation_config.json in {origin} sets {', '.join(refused)}, which Laconic does not implement: its "
            f"answers would be others than those of transformers. Remove this setting, and look at the answers"
        )

    def read(name: str) -> Any:
        return settings.get(name, getattr(model.config, name, None))

    start = next((each for each in map(read, ("decoder_start_token_id", "bos_token_id")) if each is not None), None)
    if start is None:
        raise SourceError(
            f"neither generation_config.json nor config.json in {origin} says which token begins an answer. Add "
            f"decoder_start_token_id to generation_config.json"
        )
    pad = read("pad_token_id")
    return GenerationSettings(
        decoder_start_token_id=as_ids(start)[0],
        eos_token_id=as_ids(read("eos_token_id")),
        pad_token_id=pad_id if pad is None else pad,
        max_new_tokens=max(1, min(count_new_tokens(settings, model.config, prompt), LONGEST)),
        languages=prompt.languages if prompt else (),
        forced_decoder_ids=prompt.forced if prompt else (),
        min_new_tokens=max(settings.get("min_new_tokens") or 0, shorten(settings.get("min_length")) or 0, 0),
        forced_bos_token_id=settings.get("forced_bos_token_id"),
        forced_eos_token_id=as_ids(settings.get("forced_eos_token_id")),
        suppress_tokens=as_ids(settings.get("suppress_tokens")),
        begin_suppress_tokens=as_ids(settings.get("begin_suppress_tokens")),
        repetition_penalty=settings.get("repetition_penalty", 1.0),
        no_repeat_ngram_size=settings.get("no_repeat_ngram_size", 0),
        num_beams=settings.get("num_beams", 1),
        do_sample=settings.get("do_sample", False),
        timestamps=find_timestamps(settings, model.config, prompt) if prompt else None,
    )


def find_timestamps(settings: Mapping[str, Any], config: Any, prompt: Prompt) -> TimestampSettings | None:
    """Find the timestamps of a model, one for each position of its encoder and one for the end; None where it has no
    such tokens. settings: the settings of generation."""
    plain = settings.get("no_timestamps_token_id")
    if plain is None or config.vocab_size < plain + 2 + config.max_source_positions:
        return None
    shorter = Prompt(prompt.languages, tuple(each for each in prompt.forced if each != plain))
    return TimestampSettings(
        first=plain + 1,
        latest_start=settings.get("max_initial_timestamp_index"),
        max_new_tokens=min(count_new_tokens(settings, config, shorter), LONGEST),
    )


def count_new_tokens(settings: Mapping[str, Any], config: Any, prompt: Prompt | None) -> int:
    """Return the most tokens of an answer, those of its prompt included. settings: the settings of generation."""
    if prompt is None:
        limits = (settings.get("max_new_tokens"), shorten(settings.get("max_length")), UNSTATED_LENGTH)
        most = next(each for each in limits if each is not None)
        return min(most, getattr(config, "max_position_embeddings", None) or LONGEST)
    # Whisper counts neither prompt nor start token, and leaves a position free.
    most = settings.get("max_new_tokens") or settings.get("max_length") or UNSTATED_LENGTH
    return min(len(prompt) + int(most), int(config.max_target_positions) - 1)


def shorten(length: int | None) -> int | None:
    """Return the new tokens of an answer of this length, which counts the start token."""
    return None if length is None else length - 1


def read_prompt(config: Any, generation: Any, origin: Path) -> Prompt:
    """Read the prompt that transformers makes of a config.json and a generation_config.json, without timestamps.

    config, generation: of transformers. Raises SourceError for settings that transformers refuses.
    """
    language, task = (getattr(generation, name, None) for name in ("language", "task"))
    ids = getattr(generation, "lang_to_id", None) or {}
    tasks = getattr(generation, "task_to_id", None) or {}
    forced = [] if language or task else read_forced(config, generation, origin)
    languages: tuple[int, ...] = ()
    if language:
        forced[:1] = [find_language(language, ids, origin)]
    elif ids and not any(each is not None for each in forced[:1]):
        languages, forced = tuple(ids.values()), forced[1:]
    if task and task not in tasks:
        raise SourceError(
            f"generation_config.json in {origin} sets the task {task!r}, expected one of {', '.join(tasks) or 'none'}"
        )
    if task or (language and tasks):
        forced = [*(each for each in forced if each not in tasks.values()), tasks[task or "transcribe"]]
    plain = getattr(generation, "no_timestamps_token_id", None)
    if plain is not None and forced[-1:] != [plain]:
        forced.append(plain)
    return Prompt(languages, as_ids([each for each in forced if each is not None]))


def read_forced(config: Any, generation: Any, origin: Path) -> list[int | None]:
    """Read the tokens of the older setting `forced_decoder_ids`, from the place behind the start token on."""
    pairs = getattr(generation, "forced_decoder_ids", None) or getattr(config, "forced_decoder_ids", None) or []
    if [place for place, _ in pairs] != list(range(1, len(pairs) + 1)):
        raise SourceError(
            f"forced_decoder_ids of {origin} are for the places {[place for place, _ in pairs]}, expected those from 1 "
            f"on. Give generation_config.json a language and a task in their place"
        )
    return [token for _, token in pairs]


def find_language(language: Any, ids: dict[str, int], origin: Path) -> int:
    """Find the token of a language, given as a code, its English name or its token. Raises SourceError."""
    name = str(language).lower()
    for token in (name, f"<|{name}|>", f"<|{TO_LANGUAGE_CODE.get(name)}|>"):
        if token in ids:
            return int(ids[token])
    raise SourceError(
        f"generation_config.json in {origin} sets the language {language!r}, which is none of those in its lang_to_id: "
        f"{', '.join(sorted(ids))[:300]}"
    )
