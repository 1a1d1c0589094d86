"""Where tensor bytes come from: memory, or regions of checkpoint files that are streamed and never loaded whole.

In: tensors and checkpoint folders. Out: `TensorSource` objects (name, shape, dtype, and how to stream the bytes), and
`.dat` files of them.
"""

from generic_export.weights.checkpoint import Checkpoint, open_checkpoint
from generic_export.weights.safetensors_index import UnreadableTensor, open_safetensors
from generic_export.weights.source import CHUNK_BYTES, FileTensor, InMemoryTensor, TensorSource
from generic_export.weights.torch_file import open_torch_file

__all__ = [
    "CHUNK_BYTES",
    "Checkpoint",
    "FileTensor",
    "InMemoryTensor",
    "TensorSource",
    "UnreadableTensor",
    "open_checkpoint",
    "open_safetensors",
    "open_torch_file",
]
