"""Events, the ring and paths: what leaves a training process. The only package that agents import."""
