"""An enumeration whose members are the text that travels in JSON, labels and records."""

from enum import Enum


class TextEnum(str, Enum):
    """A string enumeration; ``str()`` and f-strings give the text (Python 3.11 has it as StrEnum)."""

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(str(self.value), spec)
