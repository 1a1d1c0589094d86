"""A diagnosis as text, as one page, as reproductions."""
