"""A real browser for the reports' pages. Without a chromium on this machine these tests are skipped."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from pipeline.pack import Settings, pack
from pipeline.shards import REPORT, PackedDataset

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
PATIENCE = 300_000
"""Milliseconds until what does not come is a fault; on a busy machine a browser takes long to start."""
Scheme = Literal["light", "dark"]


class Visit(Protocol):
    """Open a page; whatever it reports or asks for beyond itself fails the test."""

    def __call__(self, path: Path, *, width: int = 1280, scheme: Scheme = "light", **context: Any) -> Page: ...


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """One browser for all tests."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser here ({', '.join(NAMES)}): on Debian, apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=list(FLAGS), timeout=PATIENCE)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Browser) -> Iterator[Visit]:
    """Opens ``file://`` pages. Afterwards: no error or warning in the console, no exception, no other request."""
    faults: list[str] = []
    contexts = []

    def opened(path: Path, *, width: int = 1280, scheme: Scheme = "light", **context: Any) -> Page:
        contexts.append(chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **context))
        contexts[-1].set_default_timeout(PATIENCE)
        page = contexts[-1].new_page()
        url = path.resolve().as_uri()
        page.on("console", lambda m: faults.append(f"console: {m.text}") if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: faults.append(f"exception: {error}"))
        page.on("request", lambda r: faults.append(f"request: {r.url}") if r.url.partition("#")[0] != url else None)
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert faults == []


@pytest.fixture(scope="package")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    """The sample in rows of 8,192 tokens, and its report made by the command."""
    root = tmp_path_factory.mktemp("sample")
    out, sample = root / "packed", str(ROOT / "data" / "sample")
    pack(Settings(source=sample, tokenizer=sample, max_tokens=8192, out=out, cache_dir=root / "cache", workers=1))
    done = subprocess.run([sys.executable, "-m", "pipeline.report", str(out)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return PackedDataset.open(out)


@pytest.fixture
def page(visit: Visit, dataset: PackedDataset) -> Page:
    """That report, opened."""
    return visit(dataset.path / REPORT)
