"""The tokenizer of a language model as metadata of a GGUF file."""

from collections.abc import Mapping
from typing import Any

import gguf
from gguf import TokenType

from export.formats.quantized_model import QuantizedModel
from export.formats.transformers_folder import find_special_tokens, read_tokenizer
from laconic.errors import FormatRefused
from laconic.models.gguf_splitting import SPLITTING, find_splitting

KEYS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "pad", "unk_token": "unk"}


def add_tokenizer(writer: gguf.GGUFWriter, source: QuantizedModel) -> None:
    """Write tokens, merges, special tokens and chat template. Raises FormatRefused for a tokenizer of another kind than
    BPE over bytes, or one that splits texts in a way that llama.cpp does not know."""
    content, task, count = read_tokenizer(source), source.task, source.model.config.vocab_size
    model = content["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name_splitting(content))
    tokens = [f"[PAD{index}]" for index in range(count)]
    types = [TokenType.UNUSED] * count
    for token, index in model["vocab"].items():
        tokens[index], types[index] = token, TokenType.NORMAL
    for each in content["added_tokens"]:
        tokens[each["id"]] = each["content"]
        types[each["id"]] = TokenType.CONTROL if each["special"] else TokenType.USER_DEFINED
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in model["merges"]])
    special = find_special_tokens(source)
    for name, key in KEYS.items():
        if (index := task.tokenizer.token_to_id(special.get(name, ""))) is not None:
            getattr(writer, f"add_{key}_token_id")(index)
    first = task.tokenizer.encode("a").ids[0]
    writer.add_add_bos_token(first == task.tokenizer.token_to_id(special.get("bos_token", "")))
    if task.chat is not None:
        writer.add_chat_template(task.chat.text)


def name_splitting(content: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for how a tokenizer splits texts. Raises FormatRefused."""
    kind, normalizer = content["model"]["type"], (content.get("normalizer") or {}).get("type", "NFC")
    name = find_splitting(content)
    if kind != "BPE" or normalizer != "NFC" or name is None:
        raise FormatRefused(
            f"the tokenizer ({kind}) splits texts in a way that has no name in llama.cpp that is known here. BPE "
            f"over bytes that splits them as {', '.join(SPLITTING)} is written. Write compressed-tensors"
        )
    return name
