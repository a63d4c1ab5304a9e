"""Chat templates that name functions and show calls of them, in the way of three families."""

from laconic.tasks.chat_template import ChatTemplate

START = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
END = "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
HERMES = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>{% endif %}"
    + START + "{% for call in message.tool_calls or [] %}<tool_call>\n"
    "{\"name\": \"{{ call.function.name }}\", \"arguments\": "
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}" + END
)  # fmt: skip
MISTRAL = (
    "{% if tools is not none %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}" + START + "{% if "
    "message.tool_calls is defined %}[TOOL_CALLS] [{% for call in message.tool_calls %}{{ call.function | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}]{% endif %}" + END
)
LLAMA = (
    "{% if not tools is defined %}{% set tools = none %}{% endif %}{% if tools is not none %}<|system|>"
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}<|end|>{% endif %}" + START + "{% if "
    "message.tool_calls is defined %}{\"name\": \"{{ message.tool_calls[0].function.name }}\", \"parameters\": "
    "{{ message.tool_calls[0].function.arguments | tojson }}}{% endif %}" + END
)  # fmt: skip
OTHER = "{{ tools }}<function=" + HERMES
TEMPLATES = {
    name: ChatTemplate(text, {}) for name, text in (("hermes", HERMES), ("mistral", MISTRAL), ("llama", LLAMA))
}
CALLS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Köln"}}]',
    "llama": '{"name": "weather", "parameters": {"city": "Köln"}}',
}
"""A call, as each writes it."""
ARGUMENTS = '{"city": "Köln"}'
