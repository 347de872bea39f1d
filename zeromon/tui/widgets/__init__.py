"""Widgets: each shows one renderable and holds no meaning of its own."""
