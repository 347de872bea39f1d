"""The agent's readings of its process: steps, memory, roles, existing objects, traces."""
