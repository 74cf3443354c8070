"""Tools as a model's chat template has them: what it may call, and calls in the text that it writes.

One notation is known, that of Qwen 2.5, Qwen 3 and the Hermes models: `<tool_call>`, a JSON object with `name` and
`arguments`, `</tool_call>`. A template with another one is refused, for its calls would come as text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from paceline.grammar import GrammarConstraint, check_guidance
from paceline.tokenizer import Tokenizer

from .api_error import ApiError
from .bodies import ChatBody
from .schemas import check_schemas
from .tool_bodies import MOST_CALLS, NamedTool, Tool

__all__ = ["CLOSE", "OPEN", "Call", "CallReader", "callable_tools", "chat_prompt", "tool_constraint"]

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
# Marks of templates whose calls stand in the same tags, but are no JSON.
_OTHER_NOTATIONS = ("<function=", "<arg_key>")


def callable_tools(body: ChatBody) -> list[Tool]:
    """The tools that the model may call; none with `tool_choice` "none".

    Raises:
        ApiError: fields that do not fit each other.
    """
    tools, choice = body.tools or [], body.tool_choice
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise _refused("tools", "two functions have the same name")
    for tool in tools:
        if (tool.function.parameters or {}).get("type", "object") != "object":
            raise _refused("tools", f"the parameters of {tool.function.name} must be a schema of type object")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise _refused("tool_choice", f"there is no function {choice.function.name} in tools")
    if choice == "required" and not tools:
        raise _refused("tool_choice", "a call is required, but there are no tools")
    if choice == "none":
        return []
    if tools and body.response_format is not None and body.response_format.type != "text":
        raise _refused("response_format", 'JSON and tools exclude each other here; give tool_choice "none"')
    if tools and body.stream_options is not None and body.stream_options.include_pieces:
        raise _refused("stream_options", "include_pieces and tools exclude each other")
    return tools


def _refused(param: str, reason: str) -> ApiError:
    return ApiError(400, f"{param}: {reason}.", param=param, code="invalid_value")


def chat_prompt(tokenizer: Tokenizer, body: ChatBody, tools: Sequence[Tool]) -> str:
    """The prompt, with the tools and the calls of earlier messages.

    Raises:
        ApiError: the template drops tools or calls, or writes calls in a notation that is not known here.
        InvalidInputError: the template refuses the messages.
    """
    messages = [message.for_template() for message in body.messages]
    if not tools:
        prompt = tokenizer.chat_prompt(messages)
    else:
        prompt = tokenizer.chat_prompt(messages, tools=[tool.for_template() for tool in tools])
        if prompt == tokenizer.chat_prompt(messages):
            raise _unsupported("tools", "knows nothing of tools")
        if not _is_known(tokenizer):
            raise _unsupported("tools", f"writes calls in another way than JSON in {OPEN} tags, the one that is read")
    for message in body.messages:
        for call in message.tool_calls or ():
            if call.function.name not in prompt:
                raise _unsupported("messages", f"drops tool_calls, such as that of {call.function.name}")
    return prompt


def _unsupported(param: str, what: str) -> ApiError:
    return ApiError(400, f"{param}: this model's chat template {what}.", param=param, code="unsupported_value")


def _is_known(tokenizer: Tokenizer) -> bool:
    template = tokenizer.chat_template or ""
    return (
        all(mark in template for mark in (OPEN, CLOSE, '"arguments"'))
        and not any(mark in template for mark in _OTHER_NOTATIONS)
        # Special tokens are left out of texts: tags that are such tokens could not be seen.
        and all(tokenizer.decode(tokenizer.encode(tag, add_special_tokens=False)) == tag for tag in (OPEN, CLOSE))
    )


def tool_constraint(tokenizer: Tokenizer, body: ChatBody, tools: Sequence[Tool]) -> GrammarConstraint | None:
    """What holds calls to the tools' schemas: where a call is required, and where a function is strict.

    Raises:
        ApiError: the schemas are too large.
        InstallationError: llguidance is missing.
        InvalidInputError: a schema cannot be honoured.
    """
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    is_forced = choice == "required" or isinstance(choice, NamedTool)
    if not is_forced and not any(tool.function.strict for tool in tools):
        return None
    check_schemas("tools", (tool.function.parameters for tool in tools if is_forced or tool.function.strict))
    tail = json.dumps(f"}}\n{CLOSE}")
    bodies = []
    for place, tool in enumerate(tools):
        head = json.dumps(f'\n{{"name": "{tool.function.name}", "arguments": ')
        schema = json.dumps(_schema(tool, is_forced))
        bodies.append(f"body_{place}: {head} %json {schema} {tail}")
    any_body = "body: " + " | ".join(f"body_{place}" for place in range(len(tools)))
    if is_forced:
        # Behind each call the text may end, also behind the line's end that models like to write first.
        several = body.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
        more = rf' ("\n" call){{0,{MOST_CALLS - 1}}} "\n"?' if several else ""
        rules = [f"start: call{more}", f'call: "{OPEN}" body']
    else:  # any text; from a tag on, a call
        rules = ["start: call* end", "end: TEXT", "TEXT: /(?s:.*)/", f'head[lazy]: TEXT "{OPEN}"', "call: head body"]
    return GrammarConstraint(tokenizer, "\n".join((*rules, any_body, *bodies)))


def _schema(tool: Tool, is_forced: bool) -> dict[str, Any]:
    """What a function's arguments have to be."""
    if not is_forced and not tool.function.strict:
        return {"type": "object"}
    parameters = tool.function.parameters
    if parameters is None:  # no parameters at all, as OpenAI's API has it
        return {"type": "object", "additionalProperties": False}
    check_guidance(parameters)
    options = {**parameters.get("x-guidance", {}), "lenient": False}  # `lenient` would drop what is not supported
    return {**parameters, "type": "object", "x-guidance": options}


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the model wrote."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def as_dict(self) -> dict[str, Any]:
        """The call as OpenAI's API has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class CallReader:
    """Reads a text piece by piece and takes the calls out of it.

    A block between tags that is no call of a known function stays in the text, tags included. Space around calls is
    dropped. At the end of the text, a call that is complete but for its closing tag counts: a stop string may have cut
    it.
    """

    def __init__(self, names: frozenset[str]) -> None:
        """Look for calls of these functions; with none, everything is text."""
        self._names = names
        self._held = ""  # outside of a block: space, and what may be the beginning of a tag
        self._space = ""  # in front of the block
        self._inside = False
        self._searched = 0  # length of a block's beginning whose closing tags belong to a string of it
        self._behind_call = False
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Take more of the text; returns what is no call for certain, and the calls that are complete."""
        if not self._names:
            return text, []
        self._held += text
        content = ""
        calls: list[Call] = []
        while True:
            if not self._inside:
                content += self._outside()
                if not self._inside:
                    return content, calls
            place = self._held.find(CLOSE, self._searched)
            if place < 0:
                return content, calls
            block = self._held[:place]
            call, may_go_on = self._call(block)
            if call is None and may_go_on:
                self._searched = place + len(CLOSE)
                continue
            self._held = self._held[place + len(CLOSE) :]
            if call is None:
                content += self._space + OPEN + block + CLOSE
            else:
                calls.append(call)
            self._leave(call)

    def end(self) -> tuple[str, list[Call]]:
        """The text is over: what is left of it."""
        rest, self._held = self._held, ""
        if not self._inside:
            return rest.lstrip() if self._behind_call else rest, []
        call, _ = self._call(rest)
        content = "" if call else self._space + OPEN + rest
        self._leave(call)
        return content, [call] if call else []

    def _outside(self) -> str:
        """Text in front of the next tag, which leads inside of a block where there is one."""
        if self._behind_call:
            self._held = self._held.lstrip()
            self._behind_call = not self._held
        before, tag, behind = self._held.partition(OPEN)
        if tag:
            content = before.rstrip()
            self._space, self._held, self._inside, self._searched = before[len(content) :], behind, True, 0
            return content
        # The end may be the beginning of a tag.
        length = max((length for length in range(1, len(OPEN)) if before.endswith(OPEN[:length])), default=0)
        content = before[: len(before) - length].rstrip()
        self._held = before[len(content) :]
        return content

    def _leave(self, call: Call | None) -> None:
        self._inside = False
        self._behind_call = call is not None
        self.num_calls += call is not None

    def _call(self, block: str) -> tuple[Call | None, bool]:
        """The call in a block, and, where there is none, whether the block may go on behind its closing tag."""
        try:
            value = from_json(block, allow_inf_nan=False)
        except ValueError as error:
            return None, "EOF while parsing a string" in str(error)
        if not isinstance(value, dict) or set(value) != {"name", "arguments"}:
            return None, False
        name, arguments = value["name"], value["arguments"]
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None, False
        return Call(name, json.dumps(arguments, ensure_ascii=False)), False
