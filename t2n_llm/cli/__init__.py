"""The command line: one file a group of commands; what an exception tells a user (`edge`), one sink for output (`console`)."""
