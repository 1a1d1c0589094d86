"""Graphs kept within the range of f16, and bf16 arithmetic written in f32."""
