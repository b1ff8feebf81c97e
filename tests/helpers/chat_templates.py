"""Short chat templates that write the markup of this year's models: thought, content and tool calls.

They are not the families' own, but what they write of an assistant's turn has the form that the family is trained to
write. So the text of a reply is what a template writes of a message.
"""

from typing import NamedTuple


class Family(NamedTuple):
    """``template``; ``special`` and ``plain``: its added tokens, of which the decoder leaves out the special ones;
    ``end``: the token that ends a turn; ``thinks``: False if it writes no reasoning; ``both``: False if content and
    calls do not go together."""

    template: str
    special: tuple[str, ...]
    end: str
    plain: tuple[str, ...] = ()
    thinks: bool = True
    both: bool = True


def template(other: str, assistant: str, opening: str) -> str:
    """Return a template of turns: ``other`` and ``assistant`` write the message ``m``, ``opening`` the beginning of the
    next turn."""
    return (
        "{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
        + assistant
        + "{%- else -%}"
        + other
        + "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}"
        + opening
        + "{%- endif -%}"
    )


def calls(each: str, before: str = "", between: str = "", after: str = "") -> str:
    """Return the part of a template that writes tool calls; ``f`` is a call's function."""
    return (
        "{%- if m.tool_calls -%}" + before + "{%- for c in m.tool_calls -%}{%- set f = c.function -%}"
        "{%- if not loop.first -%}" + between + "{%- endif -%}" + each + "{%- endfor -%}" + after + "{%- endif -%}"
    )


TEXT = "{{ m.content or '' }}"
LINE = "{{ '\\n' }}"
JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
CHATML = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
HERMES = calls("{{ '<tool_call>\\n' }}" + JSON + "{{ '\\n</tool_call>' }}", between=LINE)
THINK = "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}"
QWEN = calls(
    "{{ '<tool_call>\\n<function=' + f.name + '>\\n' }}{%- for k, v in f.arguments | items -%}"
    "{{ '<parameter=' + k + '>\\n' }}"
    "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}"
    "{{ '\\n</parameter>\\n' }}{%- endfor -%}{{ '</function>\\n</tool_call>' }}",
    between=LINE,
)
OPENING = "{{ '<|im_start|>assistant\\n' }}"
MISTRAL = calls("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}")
INST = "[INST]{{ m.content }}[/INST]"
GEMMA_VALUE = (
    '{%- macro value(v) -%}{%- if v is string -%}<|"|>{{ v }}<|"|>'
    "{%- elif v is mapping -%}{ {%- for k, w in v | dictsort -%}{{ k }}:{{ value(w) }}{{ ',' if not loop.last }}"
    "{%- endfor -%} }{%- elif v is boolean or v is none -%}{{ v | tojson }}"
    "{%- elif v is sequence -%}[{%- for w in v -%}{{ value(w) }}{{ ',' if not loop.last }}{%- endfor -%}]"
    "{%- else -%}{{ v }}{%- endif -%}{%- endmacro -%}"
)
PYTHON_VALUE = "{{ v | tojson if v is string or v is mapping else v | string }}"

FAMILIES = {
    "Qwen 3.5": Family(
        template(CHATML, OPENING + THINK + TEXT + QWEN + "<|im_end|>", OPENING + "{{ '<think>\\n' }}"),
        ("<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    ),
    "GLM-4.7": Family(
        template(
            "<|{{ m.role }}|>{{ m.content }}",
            "<|assistant|><think>{{ m.reasoning_content }}</think>"
            + TEXT
            + calls(
                "<tool_call>{{ f.name }}{%- for k, v in f.arguments | items -%}<arg_key>{{ k }}</arg_key><arg_value>"
                "{{ v if v is string else v | tojson }}</arg_value>{%- endfor -%}</tool_call>"
            ),
            "<|assistant|><think>",
        ),
        ("<|user|>", "<|assistant|>", "<|observation|>"),
        "<|user|>",
        (
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ),
    ),
    "gpt-oss": Family(
        template(
            "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>",
            "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant"
            "{%- if m.content -%}<|channel|>{{ 'commentary' if m.tool_calls else 'final' }}<|message|>{{ m.content }}"
            "{{ '<|end|><|start|>assistant' if m.tool_calls else '<|return|>' }}{%- endif -%}"
            + calls(
                "{{ '<|channel|>commentary to=functions.' + f.name + ' <|constrain|>json<|message|>' }}"
                "{{ f.arguments | tojson }}",
                between="<|call|><|start|>assistant",
            ),
            "<|start|>assistant",
        ),
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
        "<|return|>",
    ),
    "Magistral": Family(
        template(
            INST,
            "{%- if m.content is string -%}{{ m.content }}{%- else -%}{%- for p in m.content or [] -%}"
            "{%- if p.type == 'thinking' -%}[THINK]{{ p.thinking }}[/THINK]{%- else -%}{{ p.text }}{%- endif -%}"
            "{%- endfor -%}{%- endif -%}" + MISTRAL + "</s>",
            "",
        ),
        ("[INST]", "[/INST]", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "</s>"),
        "</s>",
    ),
    "Gemma 4": Family(
        GEMMA_VALUE
        + template(
            "{{ '<|turn>' + m.role + '\\n' + m.content + '<turn|>\\n' }}",
            "{{ '<|turn>model\\n<|channel>thought\\n' + m.reasoning_content + '<channel|>' }}"
            + TEXT
            + calls(
                "<|tool_call>call:{{ f.name }}{ {%- for k, v in f.arguments | dictsort -%}{{ k }}:{{ value(v) }}"
                "{{ ',' if not loop.last }}{%- endfor -%} }<tool_call|>"
            )
            + "<turn|>",
            "{{ '<|turn>model\\n' }}",
        ),
        ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
        "<turn|>",
    ),
    "LFM2": Family(
        template(
            CHATML,
            OPENING
            + "<think>{{ m.thinking }}</think>"
            + TEXT
            + calls(
                "{{ f.name }}({%- for k, v in f.arguments | items -%}{{ k }}="
                + PYTHON_VALUE
                + "{{ ', ' if not loop.last }}{%- endfor -%})",
                "<|tool_call_start|>[",
                ", ",
                "]<|tool_call_end|>",
            )
            + "<|im_end|>",
            OPENING,
        ),
        ("<|im_start|>", "<|im_end|>", "<|tool_call_start|>", "<|tool_call_end|>"),
        "<|im_end|>",
        ("<think>", "</think>"),
    ),
    "Kimi K2": Family(
        template(
            "<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>",
            "<|im_assistant|>assistant<|im_middle|><think>{{ m.reasoning_content }}</think>"
            + TEXT
            + calls(
                "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
                "{{ f.arguments | tojson }}<|tool_call_end|>",
                "<|tool_calls_section_begin|>",
                "",
                "<|tool_calls_section_end|>",
            )
            + "<|im_end|>",
            "<|im_assistant|>assistant<|im_middle|>",
        ),
        (
            "<|im_user|>",
            "<|im_assistant|>",
            "<|im_middle|>",
            "<|im_end|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        "<|im_end|>",
        ("<think>", "</think>"),
    ),
    "Kimi K3": Family(
        template(
            '<|open|>message role="{{ m.role }}"<|sep|>{{ m.content }}<|close|>message<|sep|><|end_of_msg|>',
            '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>{{ m.reasoning_content }}<|close|>think<|sep|>'
            "<|open|>response<|sep|>"
            + TEXT
            + "<|close|>response<|sep|>"
            + calls(
                '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>'
                "{%- for k, v in f.arguments | items -%}"
                '<|open|>argument key="{{ k }}" type="{{ "string" if v is string else "object" if v is mapping else '
                '"boolean" if v is boolean else "number" }}"<|sep|>{{ v if v is string else v | tojson }}'
                "<|close|>argument<|sep|>{%- endfor -%}<|close|>call<|sep|>",
                "<|open|>tools<|sep|>",
                "",
                "<|close|>tools<|sep|>",
            )
            + "<|close|>message<|sep|><|end_of_msg|>",
            '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
        ),
        ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        "<|end_of_msg|>",
    ),
    "Hermes": Family(
        template(CHATML, OPENING + TEXT + HERMES + "<|im_end|>", OPENING),
        ("<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        thinks=False,
    ),
    "Llama 3": Family(
        template(
            "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content + '<|eot_id|>' }}",
            "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
            + TEXT
            + calls('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', between="; ")
            + "<|eot_id|>",
            "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}",
        ),
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
        "<|eot_id|>",
        thinks=False,
        both=False,
    ),
}
