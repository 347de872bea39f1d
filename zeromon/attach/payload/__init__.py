"""The folder that `zeromon run` puts on the PYTHONPATH of a training command."""
