"""Heads other than the language model's: last hidden states for embeddings, logits of classes.

Their archives take `input_ids` and `attention_mask`, and keep no state.
"""
