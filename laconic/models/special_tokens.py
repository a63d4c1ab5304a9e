"""The special tokens of a checkpoint's tokenizer, and its chat template."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from laconic.errors import SourceError
from laconic.files import read_bounded
from laconic.models.source_json import read_source_json
from laconic.tasks.chat_template import ChatTemplate

TEMPLATE, SETTINGS, TOKENS = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE_BYTES = 2**18


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Read the special tokens of a folder by what they are for, as `eos_token`."""
    tokens: dict[str, str] = {}
    for name in (TOKENS, SETTINGS):
        settings = read_source_json(folder / name) if (folder / name).is_file() else {}
        for key, token in settings.items():
            content = token.get("content") if isinstance(token, dict) else token
            if key.endswith("_token") and isinstance(content, str):
                tokens[key] = content
    return tokens


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """Read the chat template of a folder, the default one of several; None without any."""
    if (folder / TEMPLATE).is_file():
        return ChatTemplate(read_template(folder / TEMPLATE), read_special_tokens(folder))
    settings = read_source_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {each.get("name"): each.get("template") for each in template}.get("default")
    return ChatTemplate(template, read_special_tokens(folder)) if isinstance(template, str) else None


def read_template(path: Path) -> str:
    """Read the text of a chat template. Raises SourceError."""
    try:
        return read_bounded(path, TEMPLATE_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        raise SourceError(f"the chat template {path} does not read: {error}. Give a text file in UTF-8") from error


def read_end_token(folder: Path, tokenizer: Tokenizer, config: Any) -> int | None:
    """Read the id of the token that ends a text: the tokenizer's, else the model's; None without one."""
    token = read_special_tokens(folder).get("eos_token")
    known = None if token is None else tokenizer.token_to_id(token)
    if known is not None:
        return int(known)
    index = getattr(config, "eos_token_id", None)
    index = index[0] if isinstance(index, list) and index else index
    return index if isinstance(index, int) else None
