"""The engines behind one interface: the wheel in a worker process, the command."""
