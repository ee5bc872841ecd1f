"""Ctrl-C while a command's modules are still being loaded: its own words and exit status 130, no traceback.

    if __name__ == "__main__":
        quiet_imports(INTERRUPTED)  # above all other imports
    ...
    def main() -> int:
        hear()  # from here on Ctrl-C is KeyboardInterrupt again

Guarantees: SIGINT that is ignored, as in a background job of a shell, stays ignored. Costs: nothing; it imports nothing
of weight.
"""

import os
import signal
from collections.abc import Callable

INTERRUPTED = "\ninterrupted: nothing half-published is left; the same command goes on from here"

_ours: Callable[..., object] | None = None


def quiet_imports(text: str) -> None:
    """Until ``hear`` is called, leave with ``text`` on stderr at Ctrl-C: nothing is begun that would need an end."""
    global _ours
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return

    def leave(*_: object) -> None:
        os.write(2, f"{text}\n".encode())
        os._exit(130)

    _ours = leave
    signal.signal(signal.SIGINT, leave)


def hear() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, if ``quiet_imports`` has changed that."""
    if _ours is not None and signal.getsignal(signal.SIGINT) is _ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
