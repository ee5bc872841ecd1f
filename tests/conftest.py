"""Fixtures for every test file."""

import os
import signal
from pathlib import Path

import hypothesis
import pytest

# A shell's background job ignores Ctrl-C, and so would every process that a test starts to interrupt it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says nothing on a machine that is doing something else too.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

NEEDED = ("qwen3_5_tokenizer", "qwen3_tokenizer", "chat_templates", "ultrachat_1019.parquet")


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
