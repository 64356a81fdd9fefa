"""A module that cannot be imported, as a user's own engine may be while it is written."""

raise RuntimeError("half\nwritten")
