"""Chat templates that name functions and show calls of them, in the way of six families."""

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
NAMED = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}" + START + "{% for call in "
    "message.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}"
    "{% endfor %}" + END
)
FENCED = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}" + START + "{% if message.tool_calls %}<|B|>"
    "{% for call in message.tool_calls %}<|b|>function<|s|>{{ call.function.name }}\n```json\n"
    "{{ call.function.arguments | tojson }}\n```<|e|>{{ '\n' if not loop.last }}{% endfor %}<|E|>{% endif %}" + END
)
for short, name in (("B", "calls▁begin"), ("E", "calls▁end"), ("b", "call▁begin"), ("e", "call▁end"), ("s", "sep")):
    FENCED = FENCED.replace(f"<|{short}|>", f"<\uff5ctool▁{name}\uff5c>")
PYTHONIC = (
    "{% if tools %}<|system|>[func_name1(params_name1=params_value1)]{{ tools | tojson }}<|end|>{% endif %}"
    + START
    + "{% if message.tool_calls %}[{% for call in message.tool_calls %}{{ call.function.name }}("
    "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]{% endif %}" + END
)
TEMPLATES = {
    name: ChatTemplate(text, {})
    for name, text in (
        ("hermes", HERMES),
        ("mistral", MISTRAL),
        ("llama", LLAMA),
        ("named", NAMED),
        ("fenced", FENCED),
        ("pythonic", PYTHONIC),
    )
}
CALLS = {
    "named": '[TOOL_CALLS]weather[ARGS]{"city": "Köln"}',
    "fenced": "<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>weather\n"
    '```json\n{"city": "Köln"}\n```<\uff5ctool▁call▁end\uff5c><\uff5ctool▁calls▁end\uff5c>',
    "pythonic": '[weather(city="Köln")]',
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Köln"}}]',
    "llama": '{"name": "weather", "parameters": {"city": "Köln"}}',
}
"""A call, as each writes it."""
TWICE = {
    "hermes": CALLS["hermes"] + "\n" + CALLS["hermes"],
    "mistral": CALLS["mistral"][:-1] + ", " + CALLS["mistral"][14:],
    "llama": CALLS["llama"] + "; " + CALLS["llama"],
    "named": CALLS["named"] * 2,
    "fenced": CALLS["fenced"][:-18] + "\n" + CALLS["fenced"][20:],
    "pythonic": CALLS["pythonic"][:-1] + ", " + CALLS["pythonic"][1:],
}
"""Two calls; Llama writes none of these by its template."""
ARGUMENTS = '{"city": "Köln"}'
