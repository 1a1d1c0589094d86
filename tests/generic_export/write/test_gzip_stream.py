"""The gzip stream of an archive: verified to the bit, although deflate has bits that say nothing."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

from generic_export.write.direct_file import OutputFile
from generic_export.write.gzip_stream import GzipSpan, GzipState, GzipStream, verify_spans

CONTENT = b"weights " * 40


def written(path: Path) -> GzipSpan:
    """Write a stream of one span, and say what it should hold."""
    file = OutputFile(path)
    reached: list[GzipState] = []
    stream = GzipStream(file, 2)
    stream.write(memoryview(CONTENT))
    stream.cut(reached.append)
    stream.finish()
    file.close()
    return GzipSpan(b"", len(CONTENT), 0, hashlib.sha256(CONTENT).hexdigest(), reached[0])


def test_a_whole_span_is_recognised(tmp_path: Path) -> None:
    span = written(tmp_path / "a.gz")
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()) == CONTENT
    assert verify_spans(tmp_path / "a.gz", [span]) == span.after


def test_no_bit_of_a_span_may_differ(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    span = written(path)
    whole = path.read_bytes()
    for place in range(GzipState().end, span.after.end):
        for bit in range(8):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << bit)]) + whole[place + 1 :])
            assert verify_spans(path, [span]) is None, f"bit {bit} of byte {place}"
