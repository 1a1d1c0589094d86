"""Archives: containers, threads, sinks, journals, gzip; written beside the target and renamed when whole."""
