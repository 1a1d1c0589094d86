"""Vision-language and speech models as coordinated archives: token embeddings, an encoder, and a decoder that takes embeddings."""
