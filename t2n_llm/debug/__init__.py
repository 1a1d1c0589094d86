"""Why a model does not export: coverage of its operators, diagnosis, tiny twins."""
