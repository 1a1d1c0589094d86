"""A name -> config, checkpoint, tokenizer: hub, folder, GGUF, adapters, empty models."""
