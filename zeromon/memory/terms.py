"""A prediction is a list of terms: bytes of one role in one place, with their cause. Pure."""

from dataclasses import dataclass
from enum import Enum

ACTIVATION = "activation"
"""Role of activations. The memory census does not count this role: it is the unattributed rest."""


class During(Enum):
    """The part of a step in which the bytes of a term exist."""

    ALWAYS = "always"
    BACKWARD = "backward"
    """From the end of forward to the end of backward, while activations exist."""
    STEP = "step"
    """From the end of backward to the end of the optimizer step."""
    GENERATION = "generation"
    """While a model that is trained by reinforcement learning generates its samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """Bytes of one role in one place, with their cause."""

    role: str
    nbytes: int
    cause: str = ""
    """Reason for bytes beyond the plain arithmetic of ZeRO; empty for the plain arithmetic."""
    place: str = "device"
    during: During = During.ALWAYS


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """All terms of one rank."""

    terms: tuple[Term, ...]

    def total(self, place: str = "device", during: During | None = None) -> int:
        """Returns the bytes in *place* at the peak, or in one part of the step."""
        if during is not None:
            wanted = (During.ALWAYS, during)
            return sum(t.nbytes for t in self.terms if t.place == place and t.during in wanted)
        return max(self.total(place, part) for part in During)

    def role(self, role: str, place: str | None = None, during: During | None = None) -> int:
        """Returns the bytes of *role*, in one place or in all places."""
        wanted = tuple(During) if during is None else (During.ALWAYS, during)
        return sum(
            t.nbytes
            for t in self.terms
            if t.role == role and place in (None, t.place) and t.during in wanted
        )

    def by_role(self, place: str = "device") -> dict[str, int]:
        """Returns role -> bytes in *place* at the peak of that place, without empty roles."""
        parts = (During.BACKWARD, During.STEP, During.GENERATION)
        during = max(parts, key=lambda part: self.total(place, part))
        roles = dict.fromkeys(t.role for t in self.terms if t.place == place)
        totals = {role: self.role(role, place, during) for role in roles}
        return {role: nbytes for role, nbytes in totals.items() if nbytes}

    @property
    def model_states(self) -> int:
        """Bytes of parameters, gradients and optimizer states by plain arithmetic, in all places.

        At their peak: the whole gradients of backward and the shard of the step never coexist.
        """
        plain = MemoryBreakdown(
            tuple(t for t in self.terms if not t.cause and t.role != ACTIVATION)
        )
        roles = {term.role for term in plain.terms}
        return max(sum(plain.role(role, during=part) for role in roles) for part in During)
