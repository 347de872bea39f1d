"""Kineto traces: the reader and the analysis."""
