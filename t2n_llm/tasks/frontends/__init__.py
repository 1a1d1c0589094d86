"""What stands before a model as a graph of its own: a waveform, or pixels, become what the model takes.

A task has it with three lines, of `frontend` (the first and the last) and `check`:

    graphs     return (*frontend_graphs(source, options, "input_features"), *the_others)
    check      return with_frontend(report, subject, "input_features"), where the others' check gave the report
    interface  {..., **frontend_record(graphs)}

The name is the input of the model that it makes. There is none, and nothing changes, where the source has no
preprocessor config, where its kind is not known here, or with `--no-frontend`. What reads the archives of a task by role
finds it as `FRONTEND`; `without_frontend` leaves it out.
"""
