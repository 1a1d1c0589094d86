"""Vision-language models as coordinated archives: token embeddings, images to embeddings, and a decoder that takes embeddings.

In: a source. Out: a folder with the three archives, whose `export.json` says how they connect.
"""

from __future__ import annotations

from t2n_llm.tasks.multimodal.export import MultimodalResult, export_multimodal
from t2n_llm.tasks.multimodal.revalidate import validate_multimodal_folder

__all__ = ["MultimodalResult", "export_multimodal", "validate_multimodal_folder"]
