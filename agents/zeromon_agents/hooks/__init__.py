"""The agent's patches: collectives in `c10d`, and one module for each training framework."""
