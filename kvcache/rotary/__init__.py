"""Rotary position embeddings as one operator, and frequencies that depend on the sequence's length."""
