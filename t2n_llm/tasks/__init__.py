"""What a kind of model is, from its skeleton to its check: one file or folder a task."""
