"""Symbolic sizes: as users declare them, as PyTorch assumes them, as tract reads them, and what can be proved of them."""
