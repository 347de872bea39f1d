"""What the agent reads from its process: steps, memory, roles, existing objects, traces."""
