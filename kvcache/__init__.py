"""States, recurrences, rotary embeddings and attention as explicit graph operators, in the forms tract recognises.

Adapters over transformers' own classes: no model's forward is written again here, unless a family's drops its state.
"""

from kvcache.attention.operator import explicit_attention
from kvcache.experts.engine import explicit_experts
from kvcache.forms import state_form
from kvcache.operators import explicit_operators
from kvcache.rotary.embedding import fuse_rotary_embedding
from kvcache.states.tensors import Slot, StateTensor

__all__ = [
    "Slot",
    "StateTensor",
    "explicit_attention",
    "explicit_experts",
    "explicit_operators",
    "fuse_rotary_embedding",
    "state_form",
]
