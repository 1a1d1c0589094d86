"""The zoo: every causal LM architecture of the installed transformers, tiny and random, exported and checked in the engine.

`configs.py` makes the models, `cell.py` takes one through the export, `host.py` runs each in a process of its own,
`run.py` spreads them, `expectations.py` and the report modules say what changed. The command is `t2n-llm zoo`.
"""
