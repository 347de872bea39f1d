"""zeromon: live OOM risk and exposed communication of ZeRO and FSDP training runs.

Importing this package loads the standard library only; every command loads what it needs.
"""

__version__ = "0.1.0"
