"""What a machine without a GPU can show of the fused kernels' glue; the rest is in tests/gpu."""

import threading
from typing import Any

import pytest
import torch


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, while it imports its compiler
def test_many_shapes_are_compiled_in_the_thread_of_the_backward_pass_too() -> None:
    """torch keeps 8 and would run the others uncompiled; its setting counts in one thread alone from 2.12 on."""
    from trainer import fused

    compiled: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    double = fused.compiled(lambda x: x * 2, backend=backend)
    thread = threading.Thread(target=lambda: [double(torch.ones(size)) for size in range(2, 22)])
    thread.start()
    thread.join()
    assert len(compiled) == 20
