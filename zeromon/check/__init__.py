"""Checks training configurations before a run: DeepSpeed JSON, accelerate YAML, Python scripts.

The checks execute no code of a script and import no framework. The entry point is
:func:`zeromon.check.runner.check`.
"""
