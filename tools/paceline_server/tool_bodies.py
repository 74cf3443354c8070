"""Tools in requests and messages: their fields, and what chat templates take of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import from_json

from .api_error import ApiError
from .strict import Strict

__all__ = ["MOST_CALLS", "NamedTool", "Tool", "ToolCall"]

MOST_CALLS = 128  # of a message

Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]


class Function(Strict):
    """A function that the assistant may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """One tool; there are only functions."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates take it; `strict` is for the server."""
        function = self.function.model_dump(exclude={"strict"}, exclude_none=True)
        return {"type": "function", "function": function}


class FunctionName(Strict):
    """A function by its name."""

    name: Name


class NamedTool(Strict):
    """`tool_choice` that names the function to call."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(Strict):
    """A function that was called, and with what."""

    name: Name
    arguments: str


class ToolCall(Strict):
    """A call in an assistant's message."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None  # clients that put streamed calls together may leave it

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates take it, its arguments parsed.

        Raises:
            ApiError: the arguments are no JSON object.
        """
        try:
            arguments = from_json(self.function.arguments, allow_inf_nan=False)
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise ApiError(
                400,
                f"messages: the arguments of tool call {self.id!r:.80} must be a JSON object, got "
                f"{self.function.arguments!r:.80}.",
                param="messages",
                code="invalid_value",
            )
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}
