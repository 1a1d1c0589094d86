"""Speed and memory of archives, of other programs with the same weights, and of operators."""
