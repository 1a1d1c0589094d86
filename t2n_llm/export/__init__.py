"""One export, whatever the task: options, pipeline, plan, and the folder it makes."""
