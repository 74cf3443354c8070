"""Bodies of requests: which fields there are, their types and ranges, and which are refused.

A field that cannot be honoured is an error that names it; none is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError
from pydantic_core import from_json

from paceline.errors import shown

from .api_error import ApiError
from .strict import Strict
from .tool_bodies import NamedTool, Tool, ToolCall

__all__ = ["ChatBody", "CompletionBody", "Message", "SamplingBody", "read_body"]

# OpenAI's parameters that are not honoured, with the values that ask for nothing.
_REFUSED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "audio": (None,),
        "best_of": (None, 1),
        "function_call": (None, "none"),
        "functions": (None, []),
        "modalities": (None, ["text"]),
        "prediction": (None,),
        "reasoning_effort": (None,),
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "suffix": (None, ""),
        "verbosity": (None,),
        "web_search_options": (None,),
    }
)
# Fields of messages that clients send back as they got them.
_EMPTY_IN_MESSAGES = ("annotations", "audio", "function_call", "refusal", "tool_calls")

Text = Annotated[str, Field(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class StreamOptions(Strict):
    """How to stream. `include_pieces` extends OpenAI's API: it tells which text the draft had proposed."""

    include_usage: bool | None = None
    include_pieces: bool | None = None
    include_obfuscation: Literal[False] | None = None


class SamplingBody(Strict):
    """What both endpoints share. `top_k` and what follows it extend OpenAI's API."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    num_draft_tokens: Annotated[int, Field(ge=0, lt=1024)] | Literal["auto"] | None = None
    drafter: Literal["draft-model", "prompt-lookup", "hybrid"] | None = None
    verification: Literal["token", "block"] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None

    @property
    def wants_pieces(self) -> bool:
        """Whether a stream tells what the draft had proposed."""
        return bool(self.stream_options and self.stream_options.include_pieces)


class CompletionBody(SamplingBody):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class TextPart(Strict):
    """A part of a message; only text can be read."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it, which know nothing of parts and developers.

        Raises:
            ApiError: calls that are not the assistant's, or whose arguments are no JSON object.
        """
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        message |= {name: value for name in ("name", "tool_call_id") if (value := getattr(self, name))}
        if self.tool_calls:
            if self.role != "assistant":
                raise ApiError(
                    400,
                    f"messages: only the assistant calls tools, but a message of the {self.role} has tool_calls.",
                    param="messages",
                    code="invalid_value",
                )
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


class JsonSchema(Strict):
    """A schema that the text has to fit."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(Strict):
    """What the text has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatBody(SamplingBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None


_Body = TypeVar("_Body", bound=SamplingBody)


def read_body(kind: type[_Body], data: bytes) -> _Body:
    """Parse and check a request's body.

    Raises:
        ApiError: 400, naming the field where there is one.
    """
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:  # no JSON, no UTF-8, or too deep
        raise ApiError(400, f"The body is no JSON: {error}.", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    for name, neutral in _REFUSED.items():
        if name in value and not any(_same(value[name], one) for one in neutral):
            raise ApiError(400, f"{name} is not supported here; leave it out.", param=name, code="unsupported_value")
        value.pop(name, None)
    for message in messages if isinstance(messages := value.get("messages"), list) else ():
        for name in _EMPTY_IN_MESSAGES if isinstance(message, dict) else ():
            if name in message and not message[name]:
                del message[name]
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _named(error) from error


def _same(value: object, other: object) -> bool:
    """Equality without Python's own, for which 1 is true."""
    return type(value) is type(other) and value == other


def _named(error: ValidationError) -> ApiError:
    """The first thing that is wrong, in one sentence."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    param = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"Unknown field {path:.200}.", param=param, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"The field {path:.200} is missing.", param=param, code="missing_required_parameter")
    return ApiError(
        400, f"{path:.200}: {first['msg']:.300}, got {shown(first['input']):.80}.", param=param, code="invalid_value"
    )
