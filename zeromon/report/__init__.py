"""A run as text: the report of a live or recorded run."""
