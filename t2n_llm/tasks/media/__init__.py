"""Files of sound and pictures that a user gives, and what a model reads of them: for `t2n-llm generate` and for calibrations."""
