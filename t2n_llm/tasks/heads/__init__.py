"""Heads other than the language model's: last hidden states for embeddings, logits of classes.

In: a source and a task. Out: a folder as of every export, whose archive takes `input_ids` and `attention_mask` and keeps no state.
"""

from __future__ import annotations

from t2n_llm.tasks.heads.export import HeadResult, export_head, plan_head_export
from t2n_llm.tasks.heads.revalidate import validate_head_folder

__all__ = ["HeadResult", "export_head", "plan_head_export", "validate_head_folder"]
