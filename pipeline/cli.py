"""What every command line refuses beyond what tyro does: an option given twice, of which the first would be dropped.

    settings = tyro.cli(Settings, prog="python -m pipeline.pack")
    refuse_repeats(Settings)

Costs: nothing; it imports nothing but tyro.
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, get_type_hints

import tyro


def refuse_repeats(*settings: type, arguments: Sequence[str] | None = None) -> None:
    """Leave with exit status 2, as at any other wrong argument, if an option stands twice in the command line.

    ``--max-tokens 1``, ``--max-tokens=1`` and ``--max_tokens 1`` are one option, and so are ``--json`` and
    ``--no-json``. Call it once tyro has accepted the command line.

    Args:
        settings: the dataclass that tyro reads, several for subcommands. What is appended to (UseAppendAction) may be
            repeated.
        arguments: what tyro reads; those of the process unless given.

    Raises:
        SystemExit: 2, after one line on stderr that names the option.
    """
    repeatable = {name for one in settings for name in _names(one, appended=True)}
    switches = {name for one in settings for name in _names(one, appended=False)}
    seen: dict[str, str] = {}
    for argument in takewhile(lambda word: word != "--", sys.argv[1:] if arguments is None else arguments):
        if not argument.startswith("--"):
            continue
        flag = argument.partition("=")[0]
        name = flag[2:].replace("_", "-")
        if name.startswith("no-") and name not in switches:
            name = name[3:]
        if name in repeatable:
            continue
        if name in seen:
            print(f"error: {_twice(seen[name], flag)}; the last one alone would count. Leave one out.", file=sys.stderr)
            raise SystemExit(2)
        seen[name] = flag


def _twice(first: str, second: str) -> str:
    return f"{first} is given twice" if first == second else f"{first} and {second} are the same option, given twice"


def _names(settings: type, *, appended: bool) -> Iterator[str]:
    """Options of a settings' dataclass, as they are spelled behind the two dashes: appended to, or all others."""
    for field, hint in get_type_hints(settings, include_extras=True).items():
        extras: tuple[Any, ...] = getattr(hint, "__metadata__", ())
        if (tyro.conf.UseAppendAction in extras) is appended:
            renamed = next((extra.name for extra in extras if getattr(extra, "name", None)), field)
            yield renamed.replace("_", "-")
