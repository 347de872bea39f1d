"""Training configurations, looked at before the run: DeepSpeed JSON, accelerate YAML, Python scripts.

Nothing that is looked at is executed, and no framework is imported. :func:`zeromon.check.run.check` is
the way in.
"""
