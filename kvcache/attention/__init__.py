"""Attention as explicit operators of the graph."""
