"""Figures as lines of styled text: pure functions of data, width and height."""
