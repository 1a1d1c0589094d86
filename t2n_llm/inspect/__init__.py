"""What an archive contains, how good its predictions are, and what an installation looks like."""
