"""Widgets: each shows lines that it is given, and draws only what is on the screen."""
