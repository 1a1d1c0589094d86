"""Operators written with other operators: while a module is captured, and in the graph afterwards."""
