"""Names of kernels: what they have in common. Pure."""

import re

_TILE = re.compile(r"_\d+x\d+.*$")
_NUMBERED = re.compile(r"_\d+(?:d\w*)?$")
_FUNCTOR = re.compile(r"at::native::(\w+)")
_WRAPPERS = ("func_wrapper_t", "gpu_kernel_impl", "gpu_kernel_impl_nocast", "ReduceOp")


def family(name: str) -> str:
    """What kernels that differ in tile, types and number have in common: ``volta_sgemm``.

    A template of torch is followed by what it applies: ``elementwise_kernel CUDAFunctor_add``.
    """
    text = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    base, _, inner = text.partition("<")
    base = base.partition("(")[0]
    short = base.rpartition("::")[2] or base
    if short == "Kernel" and inner:  # of CUTLASS
        short = inner.partition(">")[0]
    elif inner and base.startswith("at::native::"):
        functor = next((one for one in _FUNCTOR.findall(inner) if one not in _WRAPPERS), "")
        short = f"{short} {functor}".strip()
    elif base.startswith("aten::"):
        short = base
    return _NUMBERED.sub("", _TILE.sub("", short)).strip() or name[:40]
