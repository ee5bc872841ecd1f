"""Events of made-up profiler traces; times in microseconds."""

from typing import Any

Event = dict[str, Any]


def span(cat: str, name: str, begin: float, end: float, **fields: Any) -> Event:
    tid = fields.pop("tid", 1)
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "tid": tid, "args": fields}


def op(name: str, begin: float, end: float, **fields: Any) -> Event:
    return span("cpu_op", name, begin, end, **fields)


def launch(begin: float, correlation: int) -> Event:
    return span("cuda_runtime", "cudaLaunchKernel", begin, begin + 5, correlation=correlation)


def kernel(name: str, begin: float, end: float, correlation: int, **fields: Any) -> Event:
    return span("kernel", name, begin, end, correlation=correlation, tid=fields.pop("stream", 7))


def mark(number: int, begin: float, end: float) -> Event:
    return span("user_annotation", f"ProfilerStep#{number}", begin, end)


def two_steps() -> list[Event]:
    """The GPU lags: the first step's last kernel runs while the CPU is in the second."""
    return [
        mark(3, 0, 100),
        op("aten::mm", 10, 30),
        launch(20, 1),
        op("aten::add", 40, 60),
        launch(50, 2),
        kernel("sm90_xmma_gemm_bf16", 30, 90, 1),
        kernel("vectorized_add", 95, 130, 2),
        mark(4, 100, 200),
        op("aten::mm", 110, 120),
        launch(112, 3),
        kernel("sm90_xmma_gemm_bf16", 140, 180, 3),
    ]
