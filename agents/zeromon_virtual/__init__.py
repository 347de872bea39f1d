"""One training step of a real model and of the real FSDP2 code, on a device without hardware.

``python -m zeromon_virtual < spec.json`` prints what the step would cost: its time, the exposed
communication by unit, the peak of allocated memory, and the spans of all streams. The package imports
torch, and nothing of zeromon: it is started by its name, in a process of its own.
"""
