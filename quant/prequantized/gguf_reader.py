"""The `gguf` package's reader: long arrays of a file's metadata stay one piece, the tensors of all parts of a model are there.

In: the class of that package. Out: one that reads the same file into the same fields; a vocabulary of 262,144 strings, numbers and
types is not decoded until it is read. Format: `gguf.md` of ggml, `gguf_metadata_value_t`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from quant.prequantized.gguf_parts import all_parts

_SIZE = struct.Struct("<Q")
_LONG = 64  # below, an array is taken apart as the package does


@dataclass(frozen=True, eq=False)
class LongArray:
    """An array of a file's metadata.

    Attributes:
        data: its bytes (uint8): numbers, or strings one behind the other, each after its length (uint64).
        length: how many values.
        number: type of numbers; None for strings.
    """

    data: np.ndarray
    length: int
    number: type[Any] | None

    @cached_property
    def values(self) -> list[Any]:
        """The values as Python has them."""
        if self.number is not None:
            return list(self.data.view(self.number).tolist())
        blob, size_at, start, found = self.data.tobytes(), _SIZE.unpack_from, 8, []
        for _ in range(self.length):
            end = start + size_at(blob, start - 8)[0]
            found.append(blob[start:end].decode("utf-8"))
            start = end + 8
        return found


@cache
def gguf_reader() -> type[Any]:
    """Return the reader's class; besides those of its base, its objects have `paths`: the files of the model, in order.

    Raises:
        ImportError: the gguf package is not installed.
    """
    from gguf import GGUFReader, GGUFValueType
    from gguf.gguf_reader import ReaderField

    class Field(ReaderField):  # type: ignore[misc]
        """A field that may have a long array in one part."""

        def contents(self, index_or_slice: int | slice = slice(None)) -> Any:
            last = self.parts[-1]
            return last.values[index_or_slice] if isinstance(last, LongArray) else super().contents(index_or_slice)

    class Reader(GGUFReader):  # type: ignore[misc]
        """Reads long arrays of numbers and of strings at once; whatever else there is, as its base does."""

        def __init__(self, path: Any, mode: str = "r") -> None:
            super().__init__(path, mode)
            split = self.get_field("split.count")
            self.paths = all_parts(Path(path), 0 if split is None else int(split.contents()))
            self.tensors: list[Any] = sum((_Part(other, mode).tensors for other in self.paths[1:]), self.tensors)

        def _push_field(self, field: Any, skip_sum: bool = False) -> int:
            return super()._push_field(Field(*field), skip_sum)  # type: ignore[no-any-return]

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY:
                found = super()._get_field_parts(orig_offs, raw_type)
                if raw_type in self.gguf_scalar_to_np and not found[1][0].size:
                    raise ValueError("a number extends beyond the end of the file")
                return found
            data = self.data.view(np.ndarray)
            kind, length = struct.unpack_from("<IQ" if self.byte_order == "I" else ">IQ", data, orig_offs)
            if length > len(data) - orig_offs:  # the package would look for that many values behind the end
                raise ValueError(f"an array of {length} values is truncated")
            if self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            start, number = orig_offs + 12, self.gguf_scalar_to_np.get(kind)
            if length < _LONG or (number is None and kind != GGUFValueType.STRING):
                return super()._get_field_parts(orig_offs, raw_type)
            size = _strings_size(data, start, length) if number is None else length * np.dtype(number).itemsize
            if start + size > len(data):
                raise ValueError(f"an array of {length} values is truncated")
            head = [data[orig_offs : orig_offs + 4].view(np.uint32), data[orig_offs + 4 : start].view(np.uint64)]
            array = LongArray(data[start : start + size], length, number)
            return 12 + size, [*head, array], [2], [GGUFValueType.ARRAY, GGUFValueType(kind)]

    class _Part(Reader):
        """One of the other parts: its own tensors alone."""

        def __init__(self, path: Any, mode: str) -> None:
            GGUFReader.__init__(self, path, mode)

    return Reader


def array_length(field: Any) -> int:
    """Return how many values an array of a file's metadata has, without taking it apart."""
    return field.parts[-1].length if isinstance(field.parts[-1], LongArray) else len(field.data)


def _strings_size(data: Any, start: int, length: int) -> int:
    """Return how many bytes strings take that lie one behind the other, each after its length.

    Raises:
        ValueError: they end behind the file.
    """
    size_at, place, last = _SIZE.unpack_from, start, len(data) - 8
    for _ in range(length):
        if place > last:
            raise ValueError("a string extends beyond the end of the file")
        place += 8 + size_at(data, place)[0]
    return place - start


__all__ = ["LongArray", "array_length", "gguf_reader"]
