"""A chat with an exported language model: turns in the model's own template, each reading only what the engine does not hold."""
