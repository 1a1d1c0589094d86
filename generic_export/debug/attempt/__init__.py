"""One piece through capture, translation, archive, engine and comparison, in a process with limits."""
