"""Debugging: which part of a model does not export or is wrong, with evidence that can be handed on."""
