"""Options that are given twice: refused, whichever way they are spelled."""

import importlib
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import tyro

from pipeline.cli import refuse_repeats


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One option of every kind."""

    max_tokens: int = 1
    source: str = ""
    json: bool = False
    no_cache: bool = False
    row: Annotated[tuple[int, ...], tyro.conf.UseAppendAction] = ()
    track: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    every: Annotated[bool, tyro.conf.arg(name="all")] = False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--source A --source B", "--source is given twice"),
        ("--source A --json --source=A", "--source is given twice"),
        ("--max-tokens=1 --max_tokens 2", "--max-tokens and --max_tokens are the same option, given twice"),
        ("--json --json", "--json is given twice"),
        ("--json --no-json", "--json and --no-json are the same option, given twice"),
        ("--all --row 1 --no-all", "--all and --no-all"),
        ("--no-cache --no-no-cache", "--no-cache and --no-no-cache"),
    ],
)
def test_an_option_given_twice_ends_with_status_2_and_one_line(
    capsys: pytest.CaptureFixture[str], arguments: str, words: str
) -> None:
    tyro.cli(Settings, args=arguments.split())  # it accepts them all
    with pytest.raises(SystemExit) as left:
        refuse_repeats(Settings, arguments=arguments.split())
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert f"error: {words}" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--row 1 --row 2 --row=3",
        "--track a --max-tokens 2 --track b",
        "--source=--source --max-tokens 2",
        "--json --no-cache --all",
        "--source --json -- --source",
    ],
)
def test_what_may_be_repeated_and_what_is_a_value_is_left_alone(arguments: str) -> None:
    refuse_repeats(Settings, arguments=arguments.split())


def test_options_of_every_subcommand_are_known() -> None:
    @dataclass
    class Other:
        tag: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()

    refuse_repeats(Settings, Other, arguments=["other", "--tag", "a", "--tag", "b", "--row", "1", "--row", "2"])


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("pipeline.pack", "--source A --source B"),
        ("pipeline.pack", "--max-tokens 8192 --max_tokens=4096 --source /missing"),
        ("pipeline.verify", "/missing --show 1 --show 2"),
        ("pipeline.report.__main__", "/missing --out a --out b --row 1 --row 2"),
        ("pipeline.bench", "--source a --tokenizer b --notes c --notes d"),
        ("pipeline.reference", "--source a --tokenizer b --chats 1 --chats 2"),
    ],
)
def test_every_command_refuses_it_before_it_looks_at_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: str, arguments: str
) -> None:
    command: Any = importlib.import_module(module)
    monkeypatch.setattr(sys, "argv", [module, *arguments.split()])
    with pytest.raises(SystemExit) as left:
        command.main()
    assert left.value.code == 2
    assert "given twice" in capsys.readouterr().err
