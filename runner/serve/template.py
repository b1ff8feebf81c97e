"""Renders a model's chat template by ExecuTorch's server, or, for another ending of the prompt, by transformers."""

from typing import Any, NamedTuple

from executorch.examples.llm_server.python.chat_template import ChatTemplate, _decode_tool_call_arguments
from executorch.examples.llm_server.python.protocol import ChatMessage

from eagle3.runner.serve.errors import Refused
from eagle3.runner.text.checks import shown


class Ending(NamedTuple):
    """The end of a prompt: the opening of the assistant's next turn, the end of an unfinished last message, or the end
    of a finished one."""

    opens_turn: bool = True
    continues: bool = False


OPENS_TURN = Ending()


class Template(ChatTemplate):
    """ExecuTorch's chat template with more endings. Its ``render`` always adds the generation prompt; transformers
    renders the others."""

    def render_to(
        self, ending: Ending, messages: list[ChatMessage], tools: list | None, kwargs: dict[str, Any] | None
    ) -> str:
        """Return the conversation up to ``ending``."""
        if ending == OPENS_TURN:
            return self.render(messages, tools, kwargs)
        dumped = [message.model_dump(exclude_none=True) for message in messages]
        _decode_tool_call_arguments(dumped)
        return self._hf.apply_chat_template(
            dumped,
            tools=tools,
            tokenize=False,
            add_generation_prompt=ending.opens_turn,
            continue_final_message=ending.continues,
            **(kwargs or {}),
        )


def check_continued(message: ChatMessage) -> None:
    """Raise ``Refused`` for a message that cannot be the beginning of an answer."""
    reason = None
    if message.role != "assistant":
        reason = f"the last message has the role {shown(message.role)}: give the beginning of the assistant's answer"
    elif message.tool_calls:
        reason = "the last message has tool calls, after which no text can continue: give its beginning as content"
    elif not message.content:
        reason = "the last message has no content: leave continue_final_message out"
    if reason:
        raise Refused(f"continue_final_message continues an assistant's text, but {reason}", "continue_final_message")
