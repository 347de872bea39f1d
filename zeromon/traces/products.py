"""Matrix products and attention: their FLOPs by the shapes of the operators, against a roofline. Pure.

The profiler records shapes with ``record_shapes=True``. The time of an operator is that of the compute
kernels that were launched inside it, by the same thread. A product of m x k and k x n has 2 m n k FLOPs.
Attention has 2 b h q k (d + d_v), half of that with a causal mask, and 2.5 times as many backward (Dao
2023, arXiv 2307.08691, section 4.1). Bytes are the least possible: operands are read once, results are
written once. The roofline (Williams, Waterman, Patterson 2009) is the time that the larger of FLOPs by
peak and bytes by bandwidth of memory takes.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from zeromon.memory.devices import find_named_device, peak_flops
from zeromon.ring.codes import ITEM_BYTES
from zeromon.traces.events import Kind, Product, TraceData

_MATRICES = {
    "mm": 0, "addmm": 1, "addmm_": 1, "_addmm_activation": 1, "bmm": 0, "baddbmm": 1, "baddbmm_": 1,
    "_scaled_mm": 0,
}  # fmt: skip
"""Operator -> place of the first matrix among its arguments; the second follows."""
_ATTENTION = "_scaled_dot_product_"
ATTENTIONS = {
    "flash_attention": (0, 4), "flash_attention_backward": (1, 11), "efficient_attention": (0, 6),
    "efficient_attention_backward": (1, 11), "cudnn_attention": (0, 6),
    "cudnn_attention_backward": (1, 14),
}  # fmt: skip
"""Operator -> places of the query (key and value follow) and of is_causal."""
OPERATORS = frozenset(
    [f"aten::{name}" for name in _MATRICES] + [f"aten::{_ATTENTION}{name}" for name in ATTENTIONS]
)
_DTYPES = {"float": "float32", "double": "float64", "half": "float16"}
_TF32 = re.compile(r"s1688|tf32|xf32", re.IGNORECASE)
"""Kernels that multiply float32 in TensorFloat-32."""
_DEEPEST = 4
_MAX_SIZE = 1 << 40
NO_SHAPES = "the trace has no shapes of operators: record_shapes=True"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTime:
    """Totals of one operator with one shape and type."""

    op: str
    shape: str
    """``MxNxK``, with the batch before it; of attention ``BxHxQxKxD``, perhaps with ``causal``."""
    dtype: str
    count: int
    seconds: float
    flops: int | None
    """This and what follows: None with :attr:`unknown`."""
    nbytes: int | None
    peak_flops: float | None
    """FLOP/s of the device in this type; None where it is not known."""
    least_seconds: float | None
    """By the roofline."""
    is_memory_bound: bool | None
    peak_ratio: float | None
    """Achieved FLOP/s by the peak."""
    roofline_ratio: float | None
    """The least possible time by the time."""
    unknown: str = ""


def product_of(name: str, dims: Any, types: Any, values: Any) -> Product:
    """The computation of the operator *name*, by the dimensions, types and values of its arguments."""
    short = name.removeprefix("aten::").removeprefix(_ATTENTION)
    try:
        at = ATTENTIONS[short][0] if short in ATTENTIONS else _MATRICES[short]
        dtype = str(types[at]).rpartition("::")[2]
        item = ITEM_BYTES.get(dtype[:1].upper() + dtype[1:], 0)
        dtype = _DTYPES.get(dtype.lower(), dtype.lower())
        if short in ATTENTIONS:
            return _attention_product(short, dtype, item, dims, values)
        *batch, m, k = dims[at]
        *other_batch, second, n = dims[at + 1]
        if second == k and batch == other_batch and item and _are_plausible_sizes(m, n, k, *batch):
            batch_size, elements = prod(batch), m * k + k * n
            nbytes = batch_size * (elements * item + m * n * max(item, 2))
            shape = "x".join(map(str, (*batch, m, n, k)))
            return Product(short, shape, dtype, 2 * batch_size * m * n * k, nbytes)
    except (ValueError, TypeError, IndexError, KeyError, AttributeError):
        pass
    return Product(short, "", "", None, 0)


def _are_plausible_sizes(*sizes: Any) -> bool:
    return all(isinstance(size, int) and 0 < size < _MAX_SIZE for size in sizes)


def _attention_product(short: str, dtype: str, item: int, dims: Any, values: Any) -> Product:
    at, causal = ATTENTIONS[short]
    (batch, heads, queries, depth), key, value = dims[at : at + 3]
    keys, wide, is_causal = key[-2], value[-1], {"True": True, "False": False}[values[causal]]
    backward = short.endswith("_backward")
    flops = 2 * batch * heads * queries * keys * (depth + wide)
    flops = flops * (5 if backward else 2) // (4 if is_causal else 2)
    elements = batch * heads * queries * (depth + wide) + prod(key) + prod(value)
    if not item or not _are_plausible_sizes(batch, heads, queries, keys, depth, wide, *key, *value):
        raise ValueError
    shape = "x".join(map(str, (batch, heads, queries, keys, depth))) + " causal" * is_causal
    return Product(short, shape, dtype, flops, elements * item * (2 if backward else 1))


def product_times(data: TraceData) -> tuple[ProductTime, ...]:
    """The products of a trace, those that take the most time first."""
    if not data.products:
        return ()
    names = {event.name for event in data.device}
    tf32 = {name: bool(_TF32.search(name[:400])) for name in names}
    for operators in data.products.values():
        operators.sort(key=lambda operator: operator[0])
    starts = {
        thread: [operator[0] for operator in operators] for thread, operators in data.products.items()
    }
    calls: dict[tuple[int, int], tuple[int, bool]] = {}
    for event in data.device:
        launch = data.launches.of(event) if event.kind is Kind.COMPUTE else None
        if launch is None or launch.thread not in starts:
            continue
        operators = data.products[launch.thread]
        nearest = bisect_right(starts[launch.thread], launch.start_ns) - 1
        for at in range(nearest, max(-1, nearest - _DEEPEST), -1):
            if operators[at][1] >= launch.start_ns:
                spent_ns, is_tf32 = calls.get((launch.thread, at), (0, False))
                is_tf32 = is_tf32 or tf32[event.name]
                calls[launch.thread, at] = spent_ns + event.end_ns - event.start_ns, is_tf32
                break
    by_product: dict[tuple[Product, str], list[int]] = defaultdict(list)
    for (thread, at), (spent_ns, is_tf32) in calls.items():
        product = data.products[thread][at][2]
        is_tf32 = is_tf32 and product.dtype == "float32"
        by_product[product, "tf32" if is_tf32 else product.dtype].append(spent_ns)
    rows = [
        _product_row(product, dtype, durations_ns, data.device_name)
        for (product, dtype), durations_ns in by_product.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _product_row(product: Product, dtype: str, durations_ns: list[int], device: str) -> ProductTime:
    count, seconds = len(durations_ns), sum(durations_ns) / 1e9
    peak, unknown = None, NO_SHAPES
    flops = nbytes = least_seconds = bound = None
    if product.flops is not None:
        flops, nbytes = product.flops * count, product.nbytes * count
        of_device, hardware = peak_flops(device, dtype), find_named_device(device)
        if isinstance(of_device, str) or hardware is None:
            unknown = str(of_device)
        elif flops > of_device * seconds:
            unknown = f"faster than {device} is in {dtype}: the kernel computes in another type"
        else:
            peak, unknown = of_device, ""
            least_seconds = max(flops / peak, nbytes / hardware.memory)
            bound = nbytes / hardware.memory > flops / peak
    return ProductTime(
        op=product.op, shape=product.shape, dtype=dtype, count=count, seconds=seconds, flops=flops,
        nbytes=nbytes, peak_flops=peak, least_seconds=least_seconds, is_memory_bound=bound,
        peak_ratio=flops / seconds / peak if flops and peak else None,
        roofline_ratio=None if least_seconds is None else least_seconds / seconds, unknown=unknown,
    )  # fmt: skip


def overall_rates(rows: Sequence[ProductTime]) -> tuple[float | None, float | None, float | None]:
    """FLOP/s, share of the peak and share of the roofline of all *rows* that have them."""
    shaped = [row for row in rows if row.flops is not None and row.seconds]
    rated = [row for row in shaped if row.peak_flops and row.least_seconds is not None]
    seconds, of_rated = (sum(row.seconds for row in subset) for subset in (shaped, rated))
    return (
        sum(row.flops or 0 for row in shaped) / seconds if seconds else None,
        sum((row.flops or 0) / (row.peak_flops or 1) for row in rated) / of_rated if rated else None,
        sum(row.least_seconds or 0.0 for row in rated) / of_rated if rated else None,
    )
