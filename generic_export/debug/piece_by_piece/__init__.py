"""Views over the records of a diagnosis, under the names that users of the piece-by-piece tool know."""
