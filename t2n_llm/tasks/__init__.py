"""What a kind of model is, from a model without weights to its check: one file or folder a task."""
