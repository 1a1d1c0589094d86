"""States of a decoder as named tensors: where they are kept, and how they enter and leave the graph."""
