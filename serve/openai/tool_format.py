"""How models write calls of functions (tools): one format for each family, found by what its chat template contains."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How models of a family write calls: `opening`, calls, and `closing`. A call is `head`, its name, `middle`, its
    arguments in JSON, and `tail`; or as Python writes it, with arguments by their names.

    mark: what the chat templates of the family contain; unlike: what those contain that write calls otherwise.
    opening: empty where calls are the whole text. before: what is between it and the first call.
    arguments: the key of the arguments where a call is an object, whose keys may come in any order. call_id: what is
    between the name and an identifier of nine letters and digits, where there is one. between: what separates calls.
    is_repeated: whether each call has an opening and a closing of its own. is_single: whether there is one at most.
    """

    mark: str
    unlike: tuple[str, ...] = ()
    opening: str = ""
    before: str = ""
    head: str = ""
    call_id: str = ""
    middle: str = ""
    arguments: str = ""
    tail: str = ""
    closing: str = ""
    between: str = ""
    is_repeated: bool = False
    is_single: bool = False
    is_pythonic: bool = False

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Write calls as models do. calls: functions, each with its `name` and `arguments`."""
        written = [self._write_call(call["name"], call["arguments"]) for call in calls]
        begin = self.opening + self.before
        if self.is_repeated:
            return self.between.join(begin + call + self.closing for call in written)
        return begin + self.between.join(written) + self.closing

    def _write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if self.is_pythonic:
            return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        return self.head + name + self.middle + json.dumps(arguments, ensure_ascii=False) + self.tail


CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR = (
    f"<\N{FULLWIDTH VERTICAL LINE}tool▁{name}\N{FULLWIDTH VERTICAL LINE}>"
    for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
)
"""The tokens of DeepSeek's models around calls."""


def make_object_format(mark: str, *, arguments: str = "arguments", **settings: Any) -> ToolFormat:
    """Make a format whose calls are objects with `name` and arguments. arguments: their key."""
    middle = f'", "{arguments}": '
    return ToolFormat(mark=mark, head='{"name": "', middle=middle, arguments=arguments, tail="}", **settings)


FORMATS = (
    make_object_format(  # Hermes 2 Pro and 3, Qwen 2.5 and 3, Granite 4
        "<tool_call>",
        unlike=("<function=", "<arg_key>"),
        opening="<tool_call>",
        before="\n",
        closing="\n</tool_call>",
        between="\n",
        is_repeated=True,
    ),
    make_object_format(  # Mistral up to version 7 of its tokenizers
        "[TOOL_CALLS]", unlike=("[ARGS]",), opening="[TOOL_CALLS]", before="[", closing="]", between=", "
    ),
    ToolFormat(  # Mistral, version 11: Mistral Small 3.2
        mark="[CALL_ID]", opening="[TOOL_CALLS]", call_id="[CALL_ID]", middle="[ARGS]", is_repeated=True
    ),
    ToolFormat(mark="[ARGS]", opening="[TOOL_CALLS]", middle="[ARGS]", is_repeated=True),  # Mistral, version 13
    make_object_format(  # Granite 3
        "<|tool_call|>", opening="<|tool_call|>", before="[", closing="]", between=", "
    ),
    make_object_format("functools[", opening="functools", before="[", closing="]", between=", "),  # Phi 4 mini
    ToolFormat(  # DeepSeek V3.1
        mark=SEPARATOR,
        unlike=("```json",),
        opening=CALLS_BEGIN,
        head=CALL_BEGIN,
        middle=SEPARATOR,
        tail=CALL_END,
        closing=CALLS_END,
    ),
    ToolFormat(  # DeepSeek V3 and R1
        mark=SEPARATOR,
        opening=CALLS_BEGIN,
        head=f"{CALL_BEGIN}function{SEPARATOR}",
        middle="\n```json\n",
        tail=f"\n```{CALL_END}",
        closing=CALLS_END,
        between="\n",
    ),
    make_object_format(  # Llama 3.1 to 3.3
        '"parameters": ', arguments="parameters", unlike=("<function=",), is_single=True
    ),
    ToolFormat(  # LFM 2
        mark="<|tool_list_start|>",
        opening="<|tool_call_start|>",
        before="[",
        closing="]<|tool_call_end|>",
        between=", ",
        is_pythonic=True,
    ),
    ToolFormat(  # Llama 3.2 and 4, where a template asks for it
        mark="[func_name1(", before="[", closing="]", between=", ", is_pythonic=True
    ),
)


def find_special_tokens(tokens: Mapping[int, Any], tools: ToolFormat) -> Mapping[str, int]:
    """Find the special tokens in a format of calls, which texts do not show. tokens: those that were added to a
    vocabulary."""
    text = "\n".join((tools.opening, tools.head, tools.call_id, tools.middle, tools.tail, tools.closing))
    return {token.content: index for index, token in tokens.items() if token.special and token.content in text}
