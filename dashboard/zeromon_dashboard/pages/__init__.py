"""One module for each page of a run: its parts, and the skeleton that they go into."""
