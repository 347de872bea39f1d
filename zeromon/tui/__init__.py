"""The terminal view: pure renderables, thin widgets around them, one app."""
