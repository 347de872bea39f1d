"""Grafana's dashboards: what they show, and the JSON that zeromon ships of it."""
