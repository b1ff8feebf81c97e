"""Conversations in a model's own chat template, by transformers."""

from pathlib import Path

from eagle3.runner.console.text_input import check_unicode, shown

ROLES = ("system", "developer", "user", "assistant", "tool")

Message = dict[str, str]
"""``{"role": one of ROLES, "content": text}``"""


def check_messages(messages: object) -> list[Message]:
    """``messages`` themselves. Raises ValueError, with the message's number from 1, for what is no conversation."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages must be a list of one or more, found {shown(messages)}")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise ValueError(f"message {number} must have role and content and nothing else, found {shown(message)}")
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise ValueError(f"message {number} has the role {shown(role)}, but roles are {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise ValueError(f"message {number} has the content {shown(content)}, but it must be text")
        check_unicode(content, f"the content of message {number}")
    return messages


class ChatTemplate:
    """The chat template in ``folder``, with the tokenizer that goes with it. Raises ValueError where there is none, or
    the tokenizer's files do not load."""

    def __init__(self, folder: Path):
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # whatever a library makes of files that it does not know
            reason = " ".join(str(error).split())
            raise ValueError(f"the tokenizer in {folder} does not load for its chat template: {reason}") from error
        if self._tokenizer.chat_template is None:
            raise ValueError(f"the tokenizer in {folder} has no chat template: give a plain prompt, without --chat")
        self._folder = folder

    def encode(self, messages: list[Message]) -> list[int]:
        """Token ids up to where the assistant's next turn begins. Raises ValueError for what is no conversation, and
        with the template's own words for what it does not take."""
        check_messages(messages)
        try:
            return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # a template is a program of the model's authors
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"the chat template in {self._folder} does not take these messages: {reason}") from error
