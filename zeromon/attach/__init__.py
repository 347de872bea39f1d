"""Finds the ranks of a job and loads the agent into them: injection, and the launch shim."""
