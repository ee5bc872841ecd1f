"""What trainer.events and trainer.timeline say of small made-up traces, whose numbers are known."""

import gzip
import json
from pathlib import Path

import pytest

from tests.traces import kernel, launch, mark, op, span, two_steps
from trainer.events import union
from trainer.timeline import analyse, kind, main


def test_work_on_the_gpu_belongs_to_the_step_that_launched_it() -> None:
    first, second = analyse(two_steps())
    assert (first.num_gpu_ops, second.num_gpu_ops) == (2, 1)
    assert first.wall_ms == pytest.approx(0.130)
    assert second.wall_ms == pytest.approx(0.070)
    assert first.gpu_busy_ms == pytest.approx(0.095)
    assert first.gpu_idle_ms == pytest.approx(0.035)
    assert first.largest_gap_ms == pytest.approx(0.030)
    assert second.gpu_idle_ms == pytest.approx(0.030)
    assert second.largest_gap_ms == pytest.approx(0.020)


def test_a_step_that_waits_for_the_gpu_ends_with_its_annotation() -> None:
    events = [mark(0, 0, 50), launch(5, 1), kernel("a", 10, 30, 1), mark(1, 50, 90), launch(55, 2)]
    first, second = analyse([*events, kernel("a", 60, 80, 2)])
    assert first.wall_ms == pytest.approx(0.050)
    assert second.wall_ms == pytest.approx(0.040)


def test_overlapping_streams_count_once_in_busy_time_and_twice_by_kernel() -> None:
    (step,) = analyse([
        mark(0, 0, 100),
        launch(1, 1),
        launch(7, 2),
        kernel("a", 10, 50, 1),
        kernel("a", 30, 70, 2, stream=8),
    ])  # fmt: skip
    assert step.gpu_busy_ms == pytest.approx(0.060)
    assert step.kernels == {"a": (pytest.approx(0.080), 2)}
    assert step.kind_ms == {"other": pytest.approx(0.080)}


def test_nested_operations_count_once_in_time_and_each_in_number_and_threads_add_up() -> None:
    (step,) = analyse([
        mark(0, 0, 100),
        op("aten::linear", 10, 50),
        op("aten::mm", 20, 40),
        launch(25, 1),
        op("backward", 30, 60, tid=2),
    ])  # fmt: skip
    assert step.cpu_ms == pytest.approx(0.070)
    assert (step.num_ops, step.num_runtime_calls, step.num_launches) == (3, 1, 1)


def test_each_wait_is_named_with_what_is_around_it() -> None:
    (step,) = analyse([
        mark(0, 0, 100),
        op("aten::mm", 1, 5),
        op("aten::item", 10, 50),
        op("aten::_local_scalar_dense", 12, 48),
        span("cuda_runtime", "cudaMemcpyAsync", 15, 18, correlation=1),
        span("cuda_runtime", "cudaStreamSynchronize", 20, 40),
        span("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 30, 38, correlation=1, tid=7),
        span("user_annotation", "metrics", 60, 90),
        span("cuda_runtime", "cudaDeviceSynchronize", 70, 80),
        span("cuda_runtime", "cudaEventSynchronize", 92, 93),
    ])  # fmt: skip
    assert step.waits == {
        "aten::item > aten::_local_scalar_dense > cudaStreamSynchronize": 1,
        "aten::item > aten::_local_scalar_dense": 1,
        "metrics > cudaDeviceSynchronize": 1,
        "cudaEventSynchronize": 1,
    }
    assert (step.num_waits, step.num_scalar_reads, step.num_copies_to_host) == (3, 1, 1)


def test_what_lies_outside_of_every_step_is_left_out() -> None:
    events = [*two_steps(), op("aten::zeros", 500, 600), launch(510, 9), kernel("late", 520, 530, 9)]
    assert [step.num_gpu_ops for step in analyse(events)] == [2, 1]
    assert [step.num_ops for step in analyse(events)] == [2, 1]


def test_a_trace_without_steps_is_one_step_and_one_without_work_has_none() -> None:
    (step,) = analyse([event for event in two_steps() if event["cat"] != "user_annotation"])
    assert step.num_gpu_ops == 3
    assert step.wall_ms == pytest.approx(0.170)
    assert analyse([mark(0, 0, 10)]) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "matrix"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel>>", "matrix"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>", "attention"),
        ("fmha_cutlassB_bf16_aligned_64x64_k128_sm80(PyTorchMemEffAttention::AttentionBackwardKernel)", "attention"),
        ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "delta rule"),
        ("tilelang_fused_chunk_gdr_fwd_kernel", "delta rule"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other"),
        ("void batch_trsm_left_kernel<float, 64, 4, 3, false, true>(cublasTrsmBatchParams2<float>, float)", "other"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("Memset (Device)", "copies"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward", "other"),
    ],
)
def test_kernels_are_told_apart_by_name(name: str, expected: str) -> None:
    assert kind(name) == expected


def test_union_merges_what_overlaps() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]


def test_two_traces_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json.gz"
    one.write_text(json.dumps({"traceEvents": two_steps()}))
    two.write_bytes(gzip.compress(json.dumps(two_steps()[:7]).encode()))
    assert main([str(one), str(two)]) == 0
    printed = capsys.readouterr().out
    assert "one.json" in printed.splitlines()[0]
    assert "two.json.gz" in printed.splitlines()[0]
    found = [line.split() for line in printed.splitlines()]
    assert ["in", "operations", "and", "calls", "0.0", "0.0"] in found
    assert ["all", "2", "2"] in found  # 1.5 and 2 operations on the GPU
    assert main([str(one), "--json"]) == 0
    of_one = json.loads(capsys.readouterr().out)["one.json"]
    assert of_one["num_steps"] == 2
    assert of_one["matrix_share"] == pytest.approx(100 / 135, abs=1e-3)
    assert of_one["top_kernels"][0] == {"name": "sm90_xmma_gemm_bf16", "ms": 0.05, "count": 1.0, "share": 0.7407}


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"[1]", b"\x1f\x8bbroken", gzip.compress(b"[]" * 99, mtime=0)[:-9], b'{"traceEvents": 3}',
     b"[" * 100_000,
     *(b'[{"ph": "X", "name": "a", "ts": 1, "cat": "kernel"%s}]' % wrong for wrong in (
         b', "ts": "1"', b', "ts": NaN', b', "dur": null', b', "name": 3', b', "args": 3', b', "cat": null',
         b', "tid": [1]', b', "args": {"correlation": [1]}', b', "ts": 1' + b"0" * 400))],
)  # fmt: skip
def test_a_file_that_is_no_trace_is_an_error_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    assert main([str(path)]) == 2
    assert str(path) in capsys.readouterr().err
