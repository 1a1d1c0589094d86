"""A module without weights -> the finished NNEF document."""
