"""Sentences for what TensorRT's parser and builder say when they refuse a model."""

from collections.abc import Sequence
from dataclasses import dataclass

MEMORY = ("out of memory", "outofmemory", "memory allocation", "insufficient memory", "requested memory")
"""What messages about too little memory contain, in lower case."""


@dataclass(frozen=True)
class ParserProblem:
    """An error of the parser.

    node, operator: of the ONNX graph; empty if the error is about none. unsupported: whether the parser lacks the
    operator, or this use of it.
    """

    node: str
    operator: str
    description: str
    unsupported: bool


def explain_parser(problems: Sequence[ParserProblem]) -> str:
    """Explain why a model was not parsed, in one sentence and a remedy."""
    if not problems:
        return "the parser gave no reason. Check the file with `laconic lint`"
    first = problems[0]
    where = f"{first.operator or 'operator'} {first.node!r}" if first.node or first.operator else "the model"
    what = f"TensorRT lacks {where}" if first.unsupported else f"the parser refused {where}"
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    text = " ".join(first.description.split())[:200].rstrip(".")
    return f"{what}{f' ({text})' if text else ''}{more}. `laconic lint` names what TensorRT does not take"


def explain_builder(messages: Sequence[str]) -> str:
    """Explain why no engine was built, from the errors that were logged."""
    if any(word in message.lower() for message in messages for word in MEMORY):
        return (
            "the GPU has too little memory to build the engine. Give smaller bounds (shapes), a smaller workspace, or "
            "stop other programs on the GPU"
        )
    last = " ".join(messages[-1].split())[:300].rstrip(".") if messages else "the builder gave no reason"
    return f"{last}. `laconic lint` names what TensorRT does not take"
