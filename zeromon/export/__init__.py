"""Exports a recorded run for other tools: tables, traces, experiment trackers, Prometheus."""
