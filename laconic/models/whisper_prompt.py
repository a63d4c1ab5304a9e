"""The tokens with which Whisper begins an answer: language, task, and that no timestamps follow."""

from pathlib import Path
from typing import Any

from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from laconic.errors import SourceError
from laconic.tasks.generation_settings import Prompt, as_ids


def read_prompt(config: Any, generation: Any, origin: Path) -> Prompt:
    """The prompt that transformers makes of a config.json and a generation_config.json, without timestamps.

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
    """The tokens of the older setting `forced_decoder_ids`, from the place behind the start token on."""
    found = getattr(generation, "forced_decoder_ids", None) or getattr(config, "forced_decoder_ids", None) or []
    if [place for place, _ in found] != list(range(1, len(found) + 1)):
        raise SourceError(
            f"forced_decoder_ids of {origin} are for the places {[place for place, _ in found]}, expected those from 1 "
            f"on. Give generation_config.json a language and a task in their place"
        )
    return [token for _, token in found]


def find_language(language: Any, ids: dict[str, int], origin: Path) -> int:
    """The token of a language, given as a code, its English name or its token. Raises SourceError."""
    name = str(language).lower()
    for token in (name, f"<|{name}|>", f"<|{TO_LANGUAGE_CODE.get(name)}|>"):
        if token in ids:
            return int(ids[token])
    raise SourceError(
        f"generation_config.json in {origin} sets the language {language!r}, which is none of those in its lang_to_id: "
        f"{', '.join(sorted(ids))[:300]}"
    )
