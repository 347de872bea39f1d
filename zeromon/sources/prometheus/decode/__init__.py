"""Samples of a Prometheus in, the snapshots and histories out that all views know. Pure.

What is not in the samples is unknown: None, -1, or empty. Texts come from labels, which anybody may
have written: a rank that is no number is skipped, every other text is for the view to clean.
"""
