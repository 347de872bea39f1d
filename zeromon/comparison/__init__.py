"""Runs side by side: figures with their noise, significant differences, thresholds for CI. Pure."""
