"""Processes that outlive no parent and leave no hang.

Started afresh (spawn), never forked: a fork after a threaded tokenizer hangs. One worker means none: jobs run here.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from typing import Any, Self


class Workers:
    """A pool made when it is first needed; a context that ends it, at once if there was an error."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        # Parallelism is ours: a thread pool inside every process would fight over the same cores.
        os.environ["RAYON_NUM_THREADS"] = "1"
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._pool is not None:
            if error is not None:
                for process in list((self._pool._processes or {}).values()):
                    process.terminate()
            self._pool.shutdown(wait=True, cancel_futures=True)

    def map(self, function: Callable[..., Any], jobs: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """Results of ``function(*job)`` in the order of jobs, as they come."""
        todo = list(jobs)
        if self._count == 1 or len(todo) < 2:
            return (function(*job) for job in todo)
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self._count, mp_context=get_context("spawn"), initializer=_begin)
        return self._pool.map(function, *zip(*todo, strict=True))


def _begin() -> None:
    """In a worker: leave Ctrl-C to the parent, and end with it, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
