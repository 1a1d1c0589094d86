"""Speculative decoding: a cheap guess at the next tokens, which the model checks in one run; what it says stays the same."""
