"""Arithmetic on intervals, noise of figures, and bandwidth. Pure."""
