"""The NNEF document and its container: what tract reads, free of torch.fx and of aten.

In: graphs, tensors and streams of tensor bytes. Out: `graph.nnef` text, `.dat` files and archives on disk.
"""
