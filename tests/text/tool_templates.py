"""Chat templates with tools, one of each family, as short as they can be."""

from __future__ import annotations

from typing import Any

_TURNS = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}CALL{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""


def _template(told: str, call: str) -> str:
    tools = "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
    return tools + "{{- '" + told + "<|im_end|>\\n' }}{%- endif %}" + _TURNS.replace("CALL", call)


HERMES = _template(
    'Say <tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>',
    '{{- \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}",
)
LLAMA = _template(
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
    '{{- \'{"name": "\' + call.function.name + \'", "parameters": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}' }}",
)
MISTRAL = _template(
    "[AVAILABLE_TOOLS]",
    "{%- if call.id|length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}"
    "{{- '[TOOL_CALLS][' ~ call.function | tojson ~ ', \"id\": \"' + call.id + '\"]' }}",
)
UNKNOWN = _template("Say it in XML", "{{- call.function | tojson }}")
XML = _template("<tool_call>\\n<function=name>", "{{- '<tool_call><function=' + call.function.name + '>' }}")
CODER = _template('<tool_call>\\n<function=name> "arguments"', "{{- '<tool_call>' + call.function.name }}")

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "What the weather is, as an <|im_end|> or a <tool_call> would have it",
            "parameters": {
                "type": "object",
                "properties": {
                    "town": {"type": "string", "maxLength": 8},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["town", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "clock"}},
]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Is it warm?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "abcdefghi",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"town": "Köln", "days": 2}'},
            }
        ],
    },
    {"role": "tool", "content": "21 degrees", "tool_call_id": "abcdefghi"},
]
