"""Checks the request bodies of the endpoints, and converts them to the library's options.

Chat bodies extend ExecuTorch's with fields that its server refuses. An unknown field is refused, because an ignored
typing error would give another text than requested. Fields that change no text are accepted and ignored.
"""

from typing import Any, TypeVar

from executorch.examples.llm_server.python.protocol import ChatCompletionRequest, StreamOptions
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle3.runner.contract import Metadata
from eagle3.runner.serve.errors import ContextLengthExceeded, Refused
from eagle3.runner.serve.limits import MOST_CHOICES
from eagle3.runner.serve.template import Message
from eagle3.runner.text.checks import shown
from eagle3.runner.text.prompts import mixed_seed

IGNORED = frozenset(
    (
        "background", "client_metadata", "metadata", "prediction", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "safety_identifier", "service_tier", "session_id", "store", "truncation", "user",
        "verbosity",
        # vLLM and llama-server
        "cache_prompt", "cache_salt", "id_slot", "include_reasoning", "n_keep", "priority", "reasoning_format",
        "request_id", "return_progress", "timings_per_token",
        # Anthropic
        "cache_control", "context_management", "diagnostics", "inference_geo", "speed", "user_profile_id",
        "workspace_id",
    )
)  # fmt: skip
"""Fields of OpenAI, vLLM, llama-server and Anthropic that do not change the text here."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True, False), "allowed_token_ids": ([],), "bad_words": ([],), "documents": ([],),
    "dry_multiplier": (0,), "dynatemp_range": (0,), "grammar": ("",), "include_stop_str_in_output": (False,),
    "length_penalty": (1,), "lora": ([],), "mirostat": (0,), "n_predict": (-1,), "n_probs": (0,),
    "repeat_penalty": (1,), "return_token_ids": (False,), "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True, False), "tfs_z": (1,), "typical_p": (1,),
    "use_beam_search": (False,), "xtc_probability": (0,),
}  # fmt: skip
"""Fields of vLLM and llama-server with the values that ask for nothing; others are refused."""
REFUSED = {
    "audio": "this server returns only text",
    "modalities": "this server returns only text",
    "web_search_options": "this server has no search",
    "functions": "give tools",
    "function_call": "give tool_choice",
    "suffix": "this server continues text and fills no gaps",
    "previous_response_id": "this server keeps no responses: give the whole input",
    "conversation": "this server keeps no conversations: give the whole input",
    "prompt_template": "this server keeps no prompts",
}
MOST_PLACE = 200
"""The most characters of a field's name in an error."""
Body = TypeVar("Body", bound="Asked")


class Asked(BaseModel):
    """The fields of every endpoint that affect the choice of tokens, under OpenAI's names, or vLLM's if OpenAI has
    none."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    n: int | None = None

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def generations(self) -> int:
        """The number of requested generations."""
        return self.choices

    @property
    def with_usage(self) -> bool:
        """True if a stream ends with its token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, metadata: Metadata) -> dict[str, Any]:
        """Return the options of a generation without its length. The default temperature is OpenAI's, 1, or 0 if the
        artifact has no logits."""
        if not 1 <= self.choices <= MOST_CHOICES:
            raise Refused(f"n is {self.n}, but must be from 1 to {MOST_CHOICES}", "n")
        names = (
            "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty",
            "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "min_tokens", "ignore_eos",
            "structured_outputs",
        )  # fmt: skip
        options = {name: value for name in names if (value := getattr(self, name)) is not None}
        if "temperature" not in options and metadata.has_logits:
            options["temperature"] = 1.0
        if options.get("top_k") == -1:  # in vLLM, -1 means all tokens
            del options["top_k"]
        if "seed" in options:
            options["seed"] %= 1 << 63
        return options


class ChatBody(Asked, ChatCompletionRequest):
    """``POST /v1/chat/completions``"""

    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    """The default is True, or False if the last message is continued (vLLM's names)."""
    continue_final_message: bool | None = None
    return_speculation: bool | None = None
    """A field of this server only: each chunk of a stream reports the proposed and accepted tokens (``Authors``)."""


class TokenizeBody(Asked):
    """``POST /tokenize``, as vLLM has it: a text, or messages."""

    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(Asked):
    """``POST /detokenize``"""

    tokens: list[int]


class CompletionBody(Asked):
    """``POST /v1/completions``"""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    @property
    def prompts(self) -> list[Any]:
        """Each prompt, a text or token ids."""
        given: Any = self.prompt
        return given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]

    @property
    def generations(self) -> int:
        return self.choices * len(self.prompts)


class TextOptions(BaseModel):
    format: dict[str, Any] | None = None


class ReasoningOptions(BaseModel):
    effort: str | None = None


class ResponseBody(Asked):
    """``POST /v1/responses``"""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    background: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class OutputOptions(BaseModel):
    effort: str | None = None
    format: dict[str, Any] | None = None


class Said(BaseModel):
    role: str
    content: str | list[dict[str, Any]]


class MessagesBody(Asked):
    """``POST /v1/messages``, Anthropic's, and ``/v1/messages/count_tokens``, which has no ``max_tokens``"""

    messages: list[Said]
    max_tokens: int = Field(ge=1)
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    output_config: OutputOptions | None = None
    metadata: dict[str, Any] | None = None


def parse(kind: type[Body], given: object, defaults: dict[str, Any]) -> Body:
    """Return a parsed JSON body as ``kind``, with ``defaults`` for fields that it lacks. Raises ``Refused``, with the
    field's name, for an invalid value."""
    if not isinstance(given, dict):
        raise Refused("the body must be a JSON object")
    for name, reason in REFUSED.items():
        if given.get(name) not in (None, ["text"], "none") and name not in kind.model_fields:
            raise Refused(f"{name} is not supported: {reason}", name)
    for name in NEUTRAL.keys() & given.keys():
        if given[name] is not None and given[name] not in NEUTRAL[name]:
            raise Refused(f"{name} is {shown(given[name])}, which is not supported here: leave it out", name)
    skipped = (IGNORED | REFUSED.keys() | NEUTRAL.keys()) - kind.model_fields.keys()
    known = {name: value for name, value in given.items() if name not in skipped}
    own = {name: value for name, value in defaults.items() if name in kind.model_fields}
    if not given.get("tools"):
        own.pop("tool_choice", None)
    try:
        return kind.model_validate(own | {name: value for name, value in known.items() if value is not None})
    except ValidationError as error:
        raise invalid(error) from None


def invalid(error: ValidationError, before: str = "", param: str | None = None) -> Refused:
    """Return the refusal of a value that a type does not take."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"])[:MOST_PLACE]
    if first["type"] == "extra_forbidden":
        return Refused(f"{place} is no field of this request", place)
    return Refused(f"{before}{place}: {first['msg']}, found {_found(first['input'])}", param or place)


def as_messages(given: list[dict[str, Any]], field: str) -> list[Message]:
    """Return ``given`` as messages of chat completions. Raises ``Refused``; ``field`` is the request's."""
    try:
        return [Message.model_validate(message) for message in given]
    except ValidationError as error:
        raise invalid(error, f"{field}: ", field) from None


def _found(value: object) -> str:
    return type(value).__name__ if isinstance(value, dict | list) else repr(value)[:80]


def length(metadata: Metadata, prompt: list[int], wanted: int | None, name: str) -> int:
    """Return the most tokens to generate: ``wanted``, or as many as the context holds. Raises ``Refused`` and
    ContextLengthExceeded, with both numbers."""
    context = metadata.max_seq_len
    if len(prompt) >= context:
        raise ContextLengthExceeded(len(prompt), context)
    if wanted is None:
        return context - len(prompt)
    if wanted < 1:
        raise Refused(f"{name} is {wanted}, but must be 1 or more", name)
    if len(prompt) + wanted > context:
        raise ContextLengthExceeded(len(prompt), context, wanted)
    return wanted


def template_kwargs(given: dict[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Return arguments of a chat template, with a request's effort of reasoning under the names that templates read."""
    named = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return named | (given or {})


def with_own_seeds(options: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the options of ``count`` choices of one prompt. Each has a seed of its own; the first has the given
    one."""
    if "seed" not in options:
        return [options] * count
    return [options, *(options | {"seed": mixed_seed(options["seed"], index)} for index in range(1, count))]
