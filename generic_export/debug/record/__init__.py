"""What a running model does: calls, pieces, axes, states, kept in memory or on disk."""
