"""Captured operators -> NNEF: the builder, the registry, each result held against PyTorch's shape and dtype."""
