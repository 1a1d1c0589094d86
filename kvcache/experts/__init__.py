"""Mixtures of experts as explicit operators of the graph."""
