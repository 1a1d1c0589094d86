"""Exports on the Hugging Face hub: sent there, fetched from there, verified on both ways."""
