"""Our GGUF reader reads what the gguf package's own does, arrays of every kind included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from generic_export.errors import CorruptCheckpointError
from quant.prequantized import open_gguf
from quant.prequantized.gguf_reader import gguf_reader

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ARRAYS = st.one_of(
    st.lists(TEXTS, min_size=1, max_size=8),
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=8),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=8),
    st.lists(st.booleans(), min_size=1, max_size=8),
)


def written(path: Path, fields: dict[str, Any]) -> Path:
    writer = GGUFWriter(path, "llama")
    for name, value in fields.items():
        writer.add_array(name, value)
    writer.add_string("text", "a string, alone")
    writer.add_key_value("nested", [[1, 2], [3]], GGUFValueType.ARRAY, GGUFValueType.ARRAY)
    writer.add_tensor("weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def contents(reader: Any) -> dict[str, Any]:
    return {name: (field.types, field.contents()) for name, field in reader.fields.items() if name != "nested"}


@settings(max_examples=30, deadline=None)
@given(arrays=st.lists(ARRAYS, max_size=4))
def test_the_same_fields_and_tensors(tmp_path_factory: pytest.TempPathFactory, arrays: list[Any]) -> None:
    path = written(
        tmp_path_factory.mktemp("gguf") / "m.gguf", {f"array.{index}": array for index, array in enumerate(arrays)}
    )
    ours, theirs = gguf_reader()(path), GGUFReader(path)
    assert contents(ours) == contents(theirs)
    assert ours.data_offset == theirs.data_offset
    assert np.array_equal(ours.tensors[0].data, theirs.tensors[0].data)


def test_a_file_that_ends_within_a_vocabulary(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", {"tokens": [f"token {index}" for index in range(1000)]})
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(CorruptCheckpointError, match="not a complete GGUF file"):
        open_gguf(path)
