"""Renders conversations with a model's own chat template, through transformers."""

from pathlib import Path

from eagle3.runner.text.checks import check_unicode, shown

ROLES = ("system", "developer", "user", "assistant", "tool")

Message = dict[str, str]
"""``{"role": one of ROLES, "content": text}``"""


def check_messages(messages: object) -> list[Message]:
    """Return ``messages``. Raises ValueError if they are not a conversation; messages are numbered from 1."""
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


def role_in(template: object, role: str) -> str:
    """Return a message's role in a chat template: a developer becomes the system if the template has no such role."""
    return "system" if role == "developer" and role not in str(template) else role


class ChatTemplate:
    """The chat template and the tokenizer in ``folder``. Raises ValueError if there is no template or the tokenizer
    does not load."""

    def __init__(self, folder: Path):
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # the library raises many types for files that it does not know
            reason = " ".join(str(error).split())
            raise ValueError(f"the tokenizer in {folder} does not load for its chat template: {reason}") from error
        if self._tokenizer.chat_template is None:
            raise ValueError(f"the tokenizer in {folder} has no chat template: give a plain prompt, without --chat")
        self._folder = folder

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The token that ends a turn: the tokenizer's own end token, which ``config.json`` may not name."""
        end = self._tokenizer.eos_token_id
        return () if end is None else (end,)

    def render(self, messages: list[Message]) -> str:
        """Return the text of the prompt, up to the beginning of the assistant's next turn.

        Raises ValueError if ``messages`` are not a conversation, or with the template's own message if it rejects them.
        """
        template = self._tokenizer.chat_template
        told = [{**each, "role": role_in(template, each["role"])} for each in check_messages(messages)]
        try:
            return self._tokenizer.apply_chat_template(told, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program by the model's authors and may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"the chat template in {self._folder} does not take these messages: {reason}") from error
