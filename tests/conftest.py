"""Fixtures for every test file."""

import os
import random
import signal
import sys
from pathlib import Path

import hypothesis
import pytest

# A shell's background job ignores Ctrl-C, and so would every process that a test starts to interrupt it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says nothing on a machine that is doing something else too. Where CI is set, examples are
# the same in every run: others could find a fault in work that has nothing to do with it.
hypothesis.settings.register_profile(
    "patient",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("patient")

NEEDED = ("qwen3_5_tokenizer", "qwen3_tokenizer", "chat_templates", "ultrachat_1019.parquet")


def seed() -> None:
    """The same random numbers for a test whatever ran before it in this process."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _seeded_module() -> None:
    seed()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    seed()


@pytest.fixture(scope="session")
def qwen_fixtures() -> Path:
    """The folder QWEN_FIXTURES names: Qwen's tokenizers and templates, and real chats. Skips where there is none."""
    name = os.environ.get("QWEN_FIXTURES", "")
    if not name:
        pytest.skip(
            "QWEN_FIXTURES is not set: Qwen's own tokenizers, templates and real chats are not here to test with"
        )
    missing = [entry for entry in NEEDED if not (Path(name) / entry).exists()]
    if missing:
        pytest.skip(f"QWEN_FIXTURES={name} lacks {', '.join(missing)}")
    return Path(name)
