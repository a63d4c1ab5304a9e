"""How tokenizers split texts before they merge bytes, by the name that llama.cpp has for it: a GGUF file holds no more
than the name."""

from collections.abc import Mapping
from typing import Any

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
CONTRACTIONS, LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split_by(pattern: str) -> list[dict[str, Any]]:
    """Return the steps that split texts by an expression alone."""
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [step, BYTES | {"use_regex": False}]


SPLITTING: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [BYTES],
    "llama-bpe": split_by(rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}{{1,3}}|{REST}"),
    "qwen2": split_by(rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}|{REST}"),
    "smollm": [{"type": "Digits", "individual_digits": True}, BYTES],
}
"""By name, the steps of the pre-tokenizer in a tokenizer.json."""


def find_splitting(tokenizer: Mapping[str, Any]) -> str | None:
    """Find the name of how a tokenizer.json splits texts; None where it has none here."""
    steps = tokenizer.get("pre_tokenizer") or {}
    plain = [
        {key: value for key, value in step.items() if key != "trim_offsets"}
        for step in steps.get("pretokenizers", [steps])
    ]
    return next((name for name, known in SPLITTING.items() if plain == known), None)


def set_splitting(tokenizer: dict[str, Any], name: str) -> None:
    """Let a tokenizer.json split texts as the name says, where it is known here."""
    if name in SPLITTING:
        steps = [step | ({"trim_offsets": True} if step["type"] == "ByteLevel" else {}) for step in SPLITTING[name]]
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else steps[0]
