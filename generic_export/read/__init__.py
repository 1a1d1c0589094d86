"""Archives from outside: the files in one, tensor headers, and what `graph.nnef` says."""
