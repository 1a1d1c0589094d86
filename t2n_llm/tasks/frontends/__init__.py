"""What stands before a model as a graph of its own: a waveform, or pixels, become what the model takes.

A task has it with one line in its `graphs`:

    return (*frontend_graphs(source, options, "input_features"), *the_others)

The name is that of the model's input which it makes. The graph is stored, checked, described and validated by the export; the
task's own `check` and `interface` see its other graphs and archives only. There is none, and nothing changes, where the source
has no preprocessor config, where what it says has no graph here, or with `--no-frontend`.
"""
