"""Exports looked at and measured: inspection, profile, bench, text generated, quality."""
