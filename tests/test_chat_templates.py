"""Published chat templates: rendered as transformers does, and their calls of functions read back.

The folder `templates` has a few; LACONIC_CHAT_TEMPLATES names a folder with more, such as that of llama.cpp.
"""

import json
import os
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from laconic.errors import InputError
from laconic.models.processors import read_chat_template
from laconic.tasks.chat_template import ChatTemplate, adapt_calls
from serve.generation.written_choice import TextPiece, join_pieces
from serve.openai.chat_message import Message
from serve.openai.chat_request import write_calls
from serve.openai.tool_reader import ToolReader, find_tool_format

FOLDERS = [Path(__file__).parent / "templates", *map(Path, os.environ.get("LACONIC_CHAT_TEMPLATES", "").split())]
TEMPLATES = {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("*.jinja"))}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
DATE = "26 Jul 2024"
"""The date of Llama's templates where none is given."""


def say(role: str, content: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(name: str, identifier: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": identifier, "type": "function", "function": function}


def describe(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": f"<{name}>.", "parameters": parameters}}


PLACE, DAYS = {"type": "string", "description": "Where."}, {"type": "integer", "description": "How many."}
TOOLS = [describe("weather", city=PLACE, days=DAYS), describe("time")]
ASKED, CALLED = say("user", 'Is it <warm> & "sunny"?'), call("weather", "abcdefghi", city="Köln", days=3)
CALLING = [ASKED, say("assistant", tool_calls=[CALLED])]
RESULT = say("tool", "Sunny", tool_call_id="abcdefghi", name="weather")
TWO_CALLS = say("assistant", "I look.", tool_calls=[CALLED, call("time", "abcdefghj")])
CHATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "user": ([ASKED], None),
    "system": ([say("system", "Be brief."), ASKED], None),
    "turns": ([ASKED, say("assistant", "Yes."), say("user", "And now?")], None),
    "tools": ([say("system", "Be brief."), ASKED], TOOLS),
    "result": ([*CALLING, RESULT], TOOLS),
    "answer": ([*CALLING, RESULT, say("assistant", "It is."), say("user", "Thanks.")], TOOLS),
    "results": ([ASKED, TWO_CALLS, RESULT, say("tool", "12:00", tool_call_id="abcdefghj", name="time")], TOOLS),
}


@cache
def load(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name].read_text(encoding="utf-8"), TOKENS)


def read_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as the server takes them from a request."""
    return [Message.model_validate(message).flatten() for message in messages]


def render_by_transformers(template: ChatTemplate, messages: Any, tools: Any, *, prompt: bool) -> str:
    """What transformers makes of a chat, its calls in the form that the template shows."""
    if template.call_form is not None:
        messages = adapt_calls(messages, template.call_form)
    texts, _ = render_jinja_template(
        [messages], tools=tools, chat_template=template.text, add_generation_prompt=prompt, date_string=DATE, **TOKENS
    )
    return str(texts[0])


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_become_the_texts_of_transformers(name: str) -> None:
    template = load(name)
    for messages, tools in ((read_messages(messages), tools) for messages, tools in CHATS.values()):
        for prompt in (True, False):
            try:
                expected = render_by_transformers(template, messages, tools, prompt=prompt)
            except Exception:  # noqa: BLE001 - whatever the template raises
                expected = None
            if template.call_form is None and any("tool_calls" in message for message in messages):
                expected = None  # transformers would leave the calls out
            if expected is None:
                with pytest.raises(InputError, match=r"refuses the chat|knows no calls"):
                    template.render(messages, prompt=prompt, tools=tools)
            else:
                assert template.render(messages, prompt=prompt, tools=tools) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_calls_that_a_template_writes_are_read(name: str) -> None:
    template = load(name)
    try:
        tools = find_tool_format(template.text, template.shown_call)
        template.render(read_messages([ASKED]), tools=TOOLS)
    except InputError:
        pytest.skip("its calls are in another format, or it refuses tools, as in transformers")
    chat = read_messages([ASKED, TWO_CALLS])
    if tools.is_single:
        chat = read_messages(CALLING)
    calls = [each["function"] for each in chat[1]["tool_calls"]]
    if template.call_form is None:
        chat = write_calls(chat, template.text)
    before = template.render(chat[:1], prompt=True, tools=TOOLS)
    text = template.render(chat, tools=TOOLS)
    if not text.startswith(before):  # which ends with thoughts that an answer in the past has not
        before = text[: text.index(ASKED["content"]) + len(ASKED["content"])]
    written = text.removeprefix(before).strip()
    for size in (1, 7, len(written)):
        reader = ToolReader(tools, {"weather", "time"})
        pieces = [reader.read(TextPiece(0, written[start : start + size])) for start in range(0, len(written), size)]
        answer = join_pieces([*pieces, reader.read(TextPiece(0, "", (), "stop"))])
        assert [(each.name, json.loads(each.arguments)) for each in answer.calls] == [
            (each["name"], each["arguments"]) for each in calls
        ]
        assert answer.finish_reason == "tool_calls"


def test_a_marked_answer_is_its_text_and_its_variables_stay_inside() -> None:
    text = "{% set a = 1 %}{%- generation -%}{% set a = 2 %} {{ a }}{% endgeneration %}\n|{{ a }}"
    assert ChatTemplate(text, {}).render([]) == " 2|1"
    assert render_by_transformers(ChatTemplate(text, TOKENS), [], None, prompt=False) == " 2|1"


def test_a_template_with_a_date_of_its_own_keeps_it() -> None:
    own = ChatTemplate("{{ strftime_now('%Y') if strftime_now is defined else 'then' }}", {})
    assert (own.render([]), ChatTemplate("{{ strftime_now('%%') }}", {}).render([])) == ("then", "%")


def test_calls_that_a_template_shows_only_without_text_are_messages_of_their_own() -> None:
    text = (
        "{% for m in messages %}[{% if m.content is none %}{{ m.tool_calls[0].function.arguments + '!' }}"
        "{% else %}{{ m.content }}{% endif %}]{% endfor %}"
    )
    template = ChatTemplate(text, {})
    assert template.render(read_messages([ASKED, TWO_CALLS])[1:]) == '[I look.][{"city": "Köln", "days": 3}!]'
    with pytest.raises(InputError, match="knows no calls of tools"):
        ChatTemplate("{{ messages[0].content }}", {}).render(read_messages(CALLING))


@pytest.mark.parametrize("is_file", [True, False])
def test_chats_with_functions_have_a_template_of_their_own(tmp_path: Path, is_file: bool) -> None:
    texts = {"default": "plain", "tool_use": "{{ tools | length }}", "rag": "never"}
    settings: dict[str, Any] = {}
    if is_file:
        (tmp_path / "chat_template.jinja").write_text(texts["default"])
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(texts["tool_use"])
    else:
        settings["chat_template"] = [{"name": name, "template": text} for name, text in texts.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    template = read_chat_template(tmp_path)
    assert template is not None
    assert (template.reads_tools, template.for_tools.reads_tools) == (False, True)
    assert (template.render([]), template.for_tools.render([], tools=TOOLS)) == ("plain", "2")
    assert pickle.loads(pickle.dumps(template)) == ChatTemplate(**template.describe()) == template
