"""Which token comes next: a model's settings and a user's wishes in, a token out; and text of tokens, up to where it stops."""
