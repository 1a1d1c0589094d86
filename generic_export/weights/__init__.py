"""Where tensor bytes come from: memory, or regions of checkpoint files that are streamed and never loaded whole.

In: tensors and checkpoint folders. Out: `TensorSource` objects (name, shape, dtype, and how to stream the bytes).
"""

from generic_export.weights.safetensors_index import Checkpoint, UnreadableTensor, open_checkpoint, open_safetensors
from generic_export.weights.source import CHUNK_BYTES, FileTensor, InMemoryTensor, TensorSource

__all__ = [
    "CHUNK_BYTES",
    "Checkpoint",
    "FileTensor",
    "InMemoryTensor",
    "TensorSource",
    "UnreadableTensor",
    "open_checkpoint",
    "open_safetensors",
]
