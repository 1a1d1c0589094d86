"""Caches, rotary embeddings and attention as explicit graph operators, in the forms tract recognises.

Adapters over transformers' own classes: no model's forward is written again here.
"""

from kvcache.attention import explicit_attention
from kvcache.cache import CacheTensor, cache_from_tensors, cache_tensors
from kvcache.rotary import fuse_rotary_embedding

__all__ = ["CacheTensor", "cache_from_tensors", "cache_tensors", "explicit_attention", "fuse_rotary_embedding"]
