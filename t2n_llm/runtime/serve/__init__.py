"""An exported language model behind OpenAI's HTTP interface, for trying it and for tests: one model, one answer at a time."""
