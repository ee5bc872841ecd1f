"""Processes that outlive no parent and leave no hang.

Started afresh (spawn), never forked: a fork after a threaded tokenizer hangs. One worker means none: jobs run here.
What all jobs need is sent to each process once, not with every job; what a stage held is gone when its pool ends.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import wait
from typing import Any, NoReturn, Self

_shared: Any = None


def shared() -> Any:
    """In a job: what its ``Workers`` were made with."""
    return _shared


class Workers:
    """A pool made when it is first needed; a context that ends it, at once if there was an error.

    Args:
        count: of processes.
        shared: what jobs get from ``shared()``.
    """

    def __init__(self, count: int, *, shared: Any = None) -> None:
        self._count, self._shared = count, shared
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
        """Results of ``function(*job)`` in the order of jobs, as they come.

        Raises:
            OSError: a process was killed from outside; what a job raises is raised as it is.
        """
        todo = list(jobs)
        if self._count == 1 or len(todo) < 2:
            _share(self._shared)
            return (function(*job) for job in todo)
        return self._results(function, todo)

    def _results(self, function: Callable[..., Any], jobs: list[tuple[Any, ...]]) -> Iterator[Any]:
        try:
            with _sigint_held():  # handing in jobs starts processes
                if self._pool is None:
                    self._pool = ProcessPoolExecutor(
                        min(self._count, len(jobs)),
                        mp_context=get_context("spawn"),
                        initializer=_begin,
                        initargs=(self._shared,),
                    )
                futures = [self._pool.submit(_call, function, job) for job in jobs]
            futures.reverse()
            # Not the pool's own map: left early, it cancels futures here while the pool's thread fails them over there.
            while futures:
                yield futures.pop().result()
        except BrokenProcessPool:
            raise OSError(
                f"one of {self._count} worker processes was killed, perhaps for lack of memory: use fewer --workers"
            ) from None


@contextlib.contextmanager
def _sigint_held() -> Iterator[None]:
    """Start processes with SIGINT blocked, which they inherit: Ctrl-C is the parent's, from their first moment.

    Raises:
        KeyboardInterrupt: at the end, if Ctrl-C came meanwhile: a process whose start is cut short would complain.
    """
    resource_tracker.ensure_running()  # its start would unblock SIGINT
    interrupted = threading.Event()
    # Blocking is not enough here: another thread may take the signal, and Python then interrupts the main one.
    handler = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if interrupted.is_set():
        raise KeyboardInterrupt


def _share(value: Any) -> None:
    global _shared
    _shared = value


def _begin(value: Any) -> None:
    """In a worker: leave Ctrl-C to the parent, end with it, and clean up when it says so."""
    _share(value)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _end(*_: object) -> NoReturn:
    raise SystemExit(1)


def _call(function: Callable[..., Any], job: tuple[Any, ...]) -> Any:
    """Run one job. Told to end, remove what is half-written and take no other."""
    try:
        return function(*job)
    except SystemExit:
        os._exit(1)
