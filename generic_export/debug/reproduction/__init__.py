"""Reproductions of a fault: a folder for a piece of a model, and the scripts that repeat the check of a piece or an archive."""
