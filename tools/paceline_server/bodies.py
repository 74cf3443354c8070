"""Bodies of requests: which fields there are, their types and ranges, and which are refused.

A field that cannot be honoured is an error that names it; none is dropped in silence.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, Tag, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError, from_json

from paceline.errors import shown

from .api_error import ApiError
from .kinds import AUTO, LIST, NUMBER, OBJECT, TEXT, by_kind, json_kind, sent
from .strict import Strict
from .tool_bodies import MOST_CALLS, NamedTool, Tool, ToolCall

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
Stop = Annotated[
    Annotated[Text, Tag(TEXT)] | Annotated[list[Text], Field(max_length=16), Tag(LIST)],
    by_kind("a text, or a list of texts"),
]
NumDraftTokens = Annotated[
    Annotated[int, Field(ge=0, lt=1024), Tag(NUMBER)] | Annotated[Literal["auto"], Tag(AUTO)],
    by_kind("'auto', or a whole number from 0 to 1023", lambda value: AUTO if value == "auto" else json_kind(value)),
]
_LISTS = {kind: f"{LIST} of {kind}" for kind in (TEXT, NUMBER, LIST)}


def _prompt_kind(value: object) -> str | None:
    """What a prompt is; a list is of what its first entry is, and of texts where it has none."""
    if not isinstance(value, list):
        return json_kind(value)
    return _LISTS.get(json_kind(value[0]) or "") if value else _LISTS[TEXT]


Prompt = Annotated[
    Annotated[str, Tag(TEXT)]
    | Annotated[list[str], Field(min_length=1), Tag(_LISTS[TEXT])]
    | Annotated[list[TokenId], Field(min_length=1), Tag(_LISTS[NUMBER])]
    | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1), Tag(_LISTS[LIST])],
    by_kind("a text, a list of texts, a list of token ids, or a list of such lists", _prompt_kind),
]


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
    stop: Stop | None = None
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
    num_draft_tokens: NumDraftTokens | None = None
    drafter: Literal["draft-model", "prompt-lookup", "hybrid"] | None = None
    verification: Literal["token", "block"] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None

    @field_validator("stream_options")
    @classmethod
    def _of_a_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise _contradiction("There is no stream to have options; give stream: true, or leave them out")
        return value

    @property
    def field_of(self) -> dict[str, str]:
        """The field that each argument of the library is taken from, where it has another name."""
        return {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}

    @property
    def wants_pieces(self) -> bool:
        """Whether a stream tells what the draft had proposed."""
        return bool(self.stream_options and self.stream_options.include_pieces)


class CompletionBody(SamplingBody):
    """`POST /v1/completions`."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def field_of(self) -> dict[str, str]:
        """See `SamplingBody.field_of`."""
        return super().field_of | {"prompt": "prompt"}


class TextPart(Strict):
    """A part of a message; only text can be read."""

    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[list[TextPart], Tag(LIST)], by_kind("a text, or a list of parts")
]


class Message(Strict):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_call_id: Annotated[str, Field(min_length=1)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_CALLS)] | None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise _contradiction(f"Only the assistant calls tools, not the {self.role}, but there are tool_calls")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise _contradiction(
                "What a tool returned needs the tool_call_id of its call"
                if self.role == "tool"
                else f"A tool_call_id belongs to what a tool returned, not to a message of the {self.role}"
            )
        if self.content is None and self.role != "assistant":
            raise _contradiction(f"The message of the {self.role} has no content")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it, which know nothing of parts and developers.

        Raises:
            ApiError: a call's arguments are no JSON object.
        """
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        message |= {name: value for name in ("name", "tool_call_id") if (value := getattr(self, name))}
        if self.tool_calls:
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

    @model_validator(mode="after")
    def _has_a_schema_where_it_is_used(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise _contradiction(
                "The type json_schema needs json_schema"
                if self.type == "json_schema"
                else f"json_schema is of no use to the type {self.type}; leave it out, or say json_schema"
            )
        return self


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(TEXT)] | Annotated[NamedTool, Tag(OBJECT)],
    by_kind("'none', 'auto', 'required', or an object that names a function"),
]


class ChatBody(SamplingBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def field_of(self) -> dict[str, str]:
        """See `SamplingBody.field_of`."""
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        constraint = "response_format" if self.response_format and self.response_format.type != "text" else "tools"
        return super().field_of | {"prompt": "messages", "max_new_tokens": limit, "constraint": constraint}


_Body = TypeVar("_Body", bound=SamplingBody)


def read_body(kind: type[_Body], data: bytes) -> _Body:
    """Parse and check a request's body.

    Raises:
        ApiError: 400, naming the field where there is one.
    """
    try:
        value = from_json(data, allow_inf_nan=False)
        _check_keys(data)
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


class _Doubled(dict[str, Any]):
    """An object that had a key twice."""

    key: str


def _check_keys(data: bytes) -> None:
    """Refuse objects with a key that stands there twice, for one of its values would be dropped.

    Raises:
        ApiError: 400, naming the field.
    """
    doubled: list[_Doubled] = []

    def read(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            found = _Doubled(pairs)
            [(found.key, _)] = Counter(name for name, _ in pairs).most_common(1)
            doubled.append(found)
        return found

    body = json.loads(data.decode(), object_pairs_hook=read, parse_int=str, parse_float=str, strict=False)
    if doubled and isinstance(body, dict):
        field = next((name for name, value in body.items() if _holds(value, doubled)), doubled[0].key)
        raise ApiError(
            400, f"{field:.100}: the key {doubled[0].key!r:.100} stands twice in one object.",
            param=field, code="invalid_json",
        )  # fmt: skip


def _holds(value: object, doubled: list[_Doubled]) -> bool:
    if any(value is one for one in doubled):
        return True
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(_holds(one, doubled) for one in inner)


def _contradiction(message: str) -> PydanticCustomError:
    return PydanticCustomError("contradiction", "{message}", {"message": message})


def _same(value: object, other: object) -> bool:
    """Equality without Python's own, for which 1 is true."""
    return type(value) is type(other) and value == other


def _named(error: ValidationError) -> ApiError:
    """The first thing that is wrong, in one sentence."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = ".".join(map(str, sent(first["loc"])))
    param = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"Unknown field {path:.200}.", param=param, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"The field {path:.200} is missing.", param=param, code="missing_required_parameter")
    # pydantic's own words tell of Python's types.
    reason = "Input should be an object" if first["type"] in ("dict_type", "model_type") else first["msg"]
    return ApiError(
        400, f"{path:.200}: {reason:.300}, got {shown(first['input']):.80}.", param=param, code="invalid_value"
    )
