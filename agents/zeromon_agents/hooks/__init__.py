"""What the agent patches: collectives in `c10d`, and one module for each training framework."""
