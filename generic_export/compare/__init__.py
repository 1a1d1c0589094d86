"""Comparison of an archive with its module: tolerances, one record per output, other sizes than the example's."""
