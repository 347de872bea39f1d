"""Problems of a run and what to change: stragglers, hangs, and the rules. Pure."""
