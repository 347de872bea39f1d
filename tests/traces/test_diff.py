"""What differs between two traces: made ones with a known difference, and halves of real ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kineto_traces import real

from zeromon.cli import main
from zeromon.traces.analysis import analyze_trace
from zeromon.traces.diff import STEP, Change, Sample, TraceDiff, What, diff_samples, samples_of
from zeromon.traces.events import DeviceEvent, Kind, Mark, TraceData, kernel_family
from zeromon.traces.kineto import read_trace

MS = 1_000_000
GATHER = ("all_gather", "dp", 1 << 20, 2)


def trace(gemm: float = 10.0, gather: tuple[float, float] = (5.0, 9.0), *more: DeviceEvent) -> TraceData:
    """Three steps of 40 ms: a gemm, softmax and a gather at its place; lengths in ms, a bit apart."""
    data = TraceData()
    for step in range(3):
        begin, jitter = 100 * MS * step, 0.05 * step
        data.marks.append(Mark(f"ProfilerStep#{step}", begin, begin + 40 * MS, True))

        def add(kind: Kind, start: float, end: float, name: str, begin: int = begin) -> None:
            made = (round(begin + start * MS), round(begin + end * MS))
            collective = GATHER if kind is Kind.COMMUNICATION else None
            data.device.append(DeviceEvent(kind, *made, name, collective))

        add(Kind.COMPUTE, 0, gemm + jitter, f"ampere_sgemm_{32 << step}x64_tn")
        add(Kind.COMPUTE, 30, 32 + jitter, "softmax_warp_forward")
        add(Kind.COMMUNICATION, *gather, "ncclDevKernel_AllGather")
        for one in more:
            shift = begin + one.start_ns, begin + one.end_ns
            data.device.append(one._replace(start_ns=shift[0], end_ns=shift[1]))
    return data


def changes(found: TraceDiff) -> dict[str, Change | None]:
    return {row.name: row.change for row in found.changed}


def compared(before: TraceData, after: TraceData) -> dict[str, Change | None]:
    return changes(diff_samples(samples_of(before), samples_of(after)))


def test_two_traces_of_one_program_have_no_difference() -> None:
    assert compared(trace(), trace()) == {}


def test_a_kernel_that_appears_is_gone_in_the_other_direction() -> None:
    copy = DeviceEvent(Kind.COMPUTE, 34 * MS, 34 * MS + 1000, "cast_kernel", None)
    assert compared(trace(), trace(10.0, (5.0, 9.0), copy)) == {"cast_kernel": Change.APPEARED}
    assert compared(trace(10.0, (5.0, 9.0), copy), trace()) == {"cast_kernel": Change.GONE}


def test_a_longer_kernel_and_its_part_of_the_step() -> None:
    found = compared(trace(), trace(16.0))
    assert found == {"ampere_sgemm": Change.LONGER, "compute": Change.LONGER, "idle": Change.SHORTER}


def test_a_collective_that_is_not_hidden_any_more() -> None:
    found = diff_samples(samples_of(trace()), samples_of(trace(10.0, (12.0, 16.0))))
    assert changes(found) == {
        "all_gather dp": Change.EXPOSED, "exposed communication": Change.LONGER,
        "idle": Change.SHORTER,
    }  # fmt: skip
    (row,) = [row for row in found.rows if row.change is not None]
    assert (row.before.exposed_seconds, row.after.exposed_seconds) == (0, pytest.approx(0.004))


def test_more_calls() -> None:
    again = DeviceEvent(Kind.COMMUNICATION, 5 * MS, 6 * MS, "ncclDevKernel_AllGather", GATHER)
    assert compared(trace(), trace(10.0, (5.0, 9.0), again)) == {"all_gather dp": Change.MORE}


def test_what_makes_all_kernels_longer_is_said_once() -> None:
    names = [f"kernel_{letter}" for letter in "abcdefgh"]
    more = [DeviceEvent(Kind.COMPUTE, 33 * MS, 34 * MS, name, None) for name in names]
    samples = samples_of(trace(10.0, (5.0, 9.0), *more))

    def slower(sample: Sample) -> Sample:
        compute = {key for key in sample if key[0] is What.KERNEL}
        return {
            k: u._replace(seconds=u.seconds * (1.5 if k in compute else 1)) for k, u in sample.items()
        }

    found = diff_samples(samples, [slower(sample) for sample in samples])
    assert found.common_ratio == pytest.approx(1.5) and changes(found) == {}


def test_with_one_step_a_side_only_what_is_half_of_the_figure_counts() -> None:
    one = [samples_of(trace())[0]]
    assert changes(diff_samples(one, [samples_of(trace(14.0))[0]])) == {}
    assert changes(diff_samples(one, [samples_of(trace(25.0))[0]]))["ampere_sgemm"] is Change.LONGER


@pytest.mark.parametrize("name", ["two_rank_ddp_rank1.json.gz", "eight_rank_dlrm_rank3.json.gz"])
def test_halves_of_a_real_trace_do_not_differ(name: str) -> None:
    samples = samples_of(read_trace(real(name)))
    assert len(samples) >= 5
    for middle in range(2, len(samples) - 1):
        assert changes(diff_samples(samples[1:middle], samples[middle:])) == {}, middle
    for sample in samples:  # the parts are the step
        parts = [use.seconds for key, use in sample.items() if key[0] is What.PART and key != STEP]
        assert sum(parts) <= 1.02 * sample[STEP].seconds or sum(parts[:3]) > sample[STEP].seconds


def test_families_of_a_real_trace_sum_to_all_its_kernels() -> None:
    data = read_trace(real("two_rank_ddp_rank1.json.gz"))
    rank = analyze_trace(data, 1)
    gemms = [e for e in data.device if "sgemm" in e.name and e.name.startswith("volta")]
    (found,) = [one for one in rank.families if one.name == "volta_sgemm"]
    assert found.count == len(gemms) > max(k.count for k in rank.kernels if "sgemm" in k.name)
    assert found.seconds == pytest.approx(sum(e.end_ns - e.start_ns for e in gemms) / 1e9)


def test_other_kernels_of_a_real_trace_are_found() -> None:
    """The known difference: the kernels that a real trace has are left out, and one is put in."""
    samples = samples_of(read_trace(real("two_rank_ddp_rank1.json.gz")))
    without = [{k: u for k, u in s.items() if k[1] != "volta_sgemm"} for s in samples]
    assert changes(diff_samples(samples, without)) == {"volta_sgemm": Change.GONE}
    assert changes(diff_samples(without, samples)) == {"volta_sgemm": Change.APPEARED}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("volta_sgemm_128x32_nt", "volta_sgemm"),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align4>(P)",
         "cutlass_80_tensorop_s1688gemm"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, X>(int)",
         "vectorized_elementwise_kernel CUDAFunctor_add"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<int>(int)",
         "CatArrayBatchedCopy"),
        ("triton_poi_fused_add_mul_3", "triton_poi_fused_add_mul"),
        ("aten::mm", "aten::mm"), ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD"), ("<", "<"),
    ],
)  # fmt: skip
def test_a_family_is_without_tiles_types_and_numbers(name: str, expected: str) -> None:
    assert kernel_family(name) == expected


def test_the_command_says_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = str(real("two_rank_ddp_rank1.json.gz"))
    other = str(real("eight_rank_dlrm_rank3.json.gz"))
    assert main(["trace", "diff", name, name]) == 0
    assert "Nothing differs beyond noise." in capsys.readouterr().out
    assert main(["trace", "diff", name, other]) == 1
    text = capsys.readouterr().out
    assert "volta_sgemm" in text and "gone" in text and "more: --json has all" in text
    assert main(["trace", "diff", name, other, "--json"]) == 1
    assert "volta_sgemm" in json.loads(capsys.readouterr().out)["changed"]
    assert main(["trace", "diff", name, str(tmp_path)]) == 2
    assert "no step with device events" in capsys.readouterr().err
