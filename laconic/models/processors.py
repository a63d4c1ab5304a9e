"""Preprocessing of a checkpoint: its tokenizer, or plain arrays; and the task made from it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from tokenizers import Tokenizer, normalizers

from laconic import registry
from laconic.arrays import Arrays
from laconic.errors import SourceError
from laconic.files import read_bounded
from laconic.models.model_folder import read_source_json
from laconic.tasks.chat_template import ChatTemplate
from laconic.tasks.checkpoint_loading import DEFAULT_TASK
from laconic.tensor import TensorSpec

if TYPE_CHECKING:
    from laconic.tasks.task import Task


ENDLESS = 1_000_000
"""A model_max_length above this means that the tokenizer states no limit."""


def read_tokenizer(
    folder: Path, config: Any, *, lower: bool = False, special: bool = True
) -> tuple[Tokenizer, int, int | None]:
    """Read the tokenizer, the id of the padding token, and the longest text in tokens where the tokenizer states it.

    lower: whether texts are lowercased before the tokenizer's own normalization. special: whether the special tokens
    that it adds to a text are used, and so compared.
    Raises SourceError for a folder without one, and for one that transformers reads in another way.
    """
    file = folder / "tokenizer.json"
    settings = (
        read_source_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    )
    try:
        tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else convert_tokenizer(folder)
    except SourceError:
        raise
    except Exception as error:
        raise SourceError(f"the tokenizer in {folder} does not read: {error}. Copy the folder again") from error
    if file.is_file():
        check_tokenizer(folder, tokenizer, special)
    if lower:
        steps = [normalizers.Lowercase(), *([tokenizer.normalizer] if tokenizer.normalizer else [])]
        tokenizer.normalizer = normalizers.Sequence(steps)
    token = settings.get("pad_token")
    token = token.get("content") if isinstance(token, dict) else token
    pad_id = tokenizer.token_to_id(token) if token else None
    if pad_id is None:
        pad_id = getattr(config, "pad_token_id", None) or 0
    limit = settings.get("model_max_length")
    return tokenizer, int(pad_id), int(limit) if limit and limit < ENDLESS else None


PROBES = (
    "Hello, World!",
    "  naïve café\tÅngström \u200b 3.14e-5 ",
    "你好世界。 Привет мир",
    "don't -- stop… (a_b) #42 @home https://x.y/z?q=1",
    "first line\nsecond line",
    "word " * 40,
)
"""Texts by which tokenizers are compared: case, accents, spaces, punctuation, other scripts, and one to truncate."""

PROBE_LENGTH = 16
"""Tokens at which the probes are truncated."""


def check_tokenizer(folder: Path, tokenizer: Tokenizer, special: bool) -> None:
    """Raise SourceError unless texts get the ids that they get from the tokenizer that transformers reads from the
    folder, truncation included; and the special tokens that it adds, if asked for."""
    try:
        original = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the type is of a later version, or of no transformers
        raise SourceError(
            f"transformers does not read the tokenizer in {folder}, so nothing shows that texts would be prepared as "
            f"the model needs them: {type(error).__name__}, {' '.join(str(error).split())}"
        ) from error
    for text in PROBES:
        cut = original(text, truncation=True, max_length=PROBE_LENGTH, add_special_tokens=special)
        expected = list(cut["input_ids"])
        with cut_short(tokenizer):
            ids = tokenizer.encode(text, add_special_tokens=special).ids
        if ids != expected:
            raise SourceError(
                f"{folder / 'tokenizer.json'} gives {text!r} the tokens {ids}, and transformers' "
                f"{type(original).__name__} gives it {expected}, since tokenizer_config.json says something else. Save "
                f"both again with tokenizer.save_pretrained, as the model was trained"
            )


@contextmanager
def cut_short(tokenizer: Tokenizer) -> Iterator[None]:
    """Truncate texts to PROBE_LENGTH in the body, without padding. A copy would take as much memory again."""
    truncation, padding = tokenizer.truncation, tokenizer.padding
    tokenizer.no_padding()
    tokenizer.enable_truncation(PROBE_LENGTH)
    try:
        yield
    finally:
        tokenizer.no_truncation()
        if truncation is not None:
            tokenizer.enable_truncation(**truncation)
        if padding is not None:
            tokenizer.enable_padding(**padding)


def find_mask_id(folder: Path) -> int:
    """Find the id of the mask token of the tokenizer in a folder. Raises SourceError for one without."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the type is of a later version, or of no transformers
        raise SourceError(f"the tokenizer in {folder} does not read: {error}. Copy the folder again") from error
    if tokenizer.mask_token_id is None:
        raise SourceError(f"the tokenizer in {folder} has no mask token, and a masked language model needs one")
    return int(tokenizer.mask_token_id)


def convert_tokenizer(folder: Path) -> Tokenizer:
    """Convert the older vocabulary files to a tokenizer. Raises SourceError for a folder without any."""
    if (folder / "source.spm").is_file():
        raise SourceError(
            f"{folder} has a vocabulary for each of two languages (source.spm, target.spm), as Marian's translators, "
            f"and Laconic reads one tokenizer.json for both. Make one of them, or choose another translator"
        )
    if not any(
        (folder / name).is_file() for name in ("vocab.txt", "vocab.json", "sentencepiece.bpe.model", "spiece.model")
    ):
        if (folder / "preprocessor_config.json").is_file():
            raise SourceError(
                f"{folder} has no tokenizer but a preprocessor_config.json, as models of images and sound have, and "
                f"the task reads texts. Name another --task, or give the model with --builder"
            )
        raise SourceError(f"{folder} has no tokenizer.json. Copy the folder again, with its tokenizer")
    made = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return Tokenizer.from_str(made.backend_tokenizer.to_str())


def resolve_task(name: str) -> "type[Task]":
    """Return the class of a task. Raises UsageError for a name that is not registered."""
    task: type[Task] = registry.resolve("task", name)
    return task


def plain_task(
    name: str | None,
    inputs: tuple[TensorSpec, ...],
    origin: Path,
    constants: Mapping[str, Any] = {},
    typical: Arrays | None = None,
    rows: Arrays | None = None,
) -> "Task":
    """Make the task of a model that comes without a tokenizer and without settings for images.

    name: by default the one for plain arrays. constants: values of inputs of the file that samples may repeat. typical:
    a sample to time with, [1, ...] by input. rows: a few samples to try the model on. Raises SourceError for a task
    that needs more than the model's inputs.
    """
    try:
        task = resolve_task(name or DEFAULT_TASK).from_signature(inputs)
    except SourceError as error:
        raise SourceError(f"{origin}: {error}") from None
    task.constants, task.typical_sample, task.sample_rows = constants, typical or {}, rows or {}
    return task


TEMPLATE, SETTINGS, TOKENS = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
OLDER_TEMPLATE = "chat_template.json"
"""Where older folders of vision-language models have the template, as SmolVLM's and LLaVA's."""
MORE_TEMPLATES, DEFAULT, FOR_TOOLS = "additional_chat_templates", "default", "tool_use"
"""The folder of further chat templates, and the names of templates, as transformers has them."""
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
    """Read the chat template of a folder: the default one of several, and the one for tools; None without any."""
    settings = read_source_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    older = read_source_json(folder / OLDER_TEMPLATE) if (folder / OLDER_TEMPLATE).is_file() else {}
    named = settings.get("chat_template") or older.get("chat_template")
    templates = {each.get("name"): each.get("template") for each in named} if isinstance(named, list) else {}
    if isinstance(named, str):
        templates[DEFAULT] = named
    for name, path in ((DEFAULT, folder / TEMPLATE), (FOR_TOOLS, folder / MORE_TEMPLATES / f"{FOR_TOOLS}.jinja")):
        if path.is_file():
            templates[name] = read_template(path)
    default, for_tools = templates.get(DEFAULT), templates.get(FOR_TOOLS)
    if not isinstance(default, str):
        return None
    return ChatTemplate(default, read_special_tokens(folder), for_tools if isinstance(for_tools, str) else "")


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
