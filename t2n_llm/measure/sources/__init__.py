"""Files of sound and pictures that a user gives beside a text: what `t2n-llm generate --audio` and `--image` read."""
