"""Pipelines of diffusers: each component of a folder with `model_index.json`, exported by itself."""
