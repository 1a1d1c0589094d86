"""Encoder-decoder models: an encoder that is asked once, and a decoder with two caches."""
