"""A CUDA device without a GPU: the real CUDA build of torch on our own libraries.

See docs/explanation/virtual-device.md.
"""
