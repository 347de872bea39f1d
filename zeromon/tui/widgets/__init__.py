"""Widgets: each draws lines, and only those on the screen."""
