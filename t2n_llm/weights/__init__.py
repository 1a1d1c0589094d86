"""Which checkpoint tensor is which parameter; conversions; archives read back."""
