"""Modules of whole libraries, small and random: a file a library lists its cases, `trial.py` takes one through an export."""
