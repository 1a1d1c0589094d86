"""Exports run: text generated, chats, sampling, the HTTP server."""
