"""What is wrong with a run and what to change: stragglers, hangs, and the rules. Pure."""
