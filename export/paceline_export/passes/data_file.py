"""Write a graph's weights to its file of external data as they come, so that they need not be held until the end."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import onnx_ir as ir

__all__ = ["DataFile"]

_LEAST = 256  # bytes; what is smaller stays in the graph's own file
_ALIGNMENT = 64  # bytes, so that the largest vectors of a processor are read in one piece


class DataFile:
    """The file that holds a graph's weights. A context: at its end the file is closed.

    Args:
        path: of the file, which must not exist; the graph is saved beside it.
        max_bytes: of one file; behind it others are begun, named `NAME.1`, `NAME.2`, …. A tensor is never cut: a larger
            one has a file to itself. None means one file.
    """

    def __init__(self, path: Path, max_bytes: int | None = None) -> None:
        self._first = self._path = path
        self._max_bytes = max_bytes
        self._files = 1
        self._file = path.open("xb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def take(self, model: ir.Model, names: Iterable[str] | None = None) -> None:
        """Write the values of initializers and let the graph refer to them, in place.

        Args:
            model: whose initializers have values.
            names: of those to write, None for all; written ones are left, and so are small ones.
        """
        for name in list(model.graph.initializers if names is None else names):
            value = model.graph.initializers[name]
            tensor = value.const_value
            if tensor is None or isinstance(tensor, ir.ExternalTensor) or tensor.nbytes < _LEAST:
                continue
            value.const_value = self._write(name, tensor)

    def _write(self, name: str, tensor: ir.TensorProtocol) -> ir.ExternalTensor:
        offset = -(-self._file.tell() // _ALIGNMENT) * _ALIGNMENT
        if self._max_bytes is not None and offset and offset + tensor.nbytes > self._max_bytes:
            self._file.close()
            self._path = self._first.with_name(f"{self._first.name}.{self._files}")
            self._file = self._path.open("xb")
            self._files += 1
            offset = 0
        self._file.seek(offset)
        tensor.tofile(self._file)
        self._file.flush()  # it may be read again
        return ir.ExternalTensor(
            self._path.name,
            offset,
            tensor.nbytes,
            tensor.dtype,
            shape=ir.Shape(tensor.shape),
            name=name,
            base_dir=self._path.parent,
        )
