"""Checkpoints that are damaged in state.json, on a failing disk or by a full one: the older one serves."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer import checkpoint
from trainer.checkpoint import CheckpointError, TrainingState, load_latest, save, state_checksum, steps, verify

Parts = tuple[torch.nn.Module, torch.optim.Optimizer]


def parts() -> Parts:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    """The newer of two checkpoints of a run."""
    model, optimizer = parts()
    for step in (2, 4):
        save(tmp_path, step=step, model=model, optimizer=optimizer, cursor={"rows_seen": 8 * step, "by": {1: 0.5}})
    return steps(tmp_path)[-1]


def resumed(newest: Path, said: list[str]) -> TrainingState:
    model, optimizer = parts()
    state = load_latest(newest.parents[1], model=model, optimizer=optimizer, say=said.append)
    assert state is not None
    return state


def the_older_one_serves(newest: Path, file: str) -> None:
    said: list[str] = []
    assert resumed(newest, said).step == 2
    assert f"{newest / file}: " in said[0]
    assert "Going on from the older checkpoint" in said[0]


def test_one_digit_of_any_number_is_found(newest: Path) -> None:
    file = newest / "state.json"
    whole = file.read_text()
    digits = list(re.finditer(r"\d", whole))
    assert len(digits) > 100
    for digit in digits:
        other = str((int(digit[0]) + 1) % 10)
        file.write_text(f"{whole[: digit.start()]}{other}{whole[digit.end() :]}")
        with pytest.raises(CheckpointError, match=r"state\.json"):
            verify(newest)
    for name in ("rows_seen", "step", "lr", "betas", "weight_decay", "bytes"):
        file.write_text(
            re.sub(rf'("{name}": \[?\s*[0-9.]*)(\d)', lambda m: m[1] + str((int(m[2]) + 1) % 10), whole, count=1)
        )
        assert file.read_text() != whole, name
        the_older_one_serves(newest, "state.json")
    file.write_text(whole)
    assert resumed(newest, []).step == 4


MALFORMED: list[dict[str, Any]] = [
    {"files": []},
    {"files": {}},
    {"files": None},
    {"files": {"model.safetensors": {}}},
    {"files": {name: {} for name in ("model.safetensors", "optimizer.safetensors", "rng.safetensors")}},
    {"files": dict.fromkeys(("model.safetensors", "optimizer.safetensors", "rng.safetensors"), 1)},
    {"files": {name: {} for name in ("model.safetensors", "optimizer.safetensors", "../state.json")}},
    {"step": "4"},
    {"cursor": None},
    {"extra": []},
    {"frozen": 1},
    {"optimizer": None},
    {"masters": []},
    {"param_groups": {}},
    {"param_groups": [1]},
    {"param_groups": [{}]},
]


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("change", MALFORMED, ids=json.dumps)
def test_malformed_content_is_damage(newest: Path, change: dict[str, Any], *, signed: bool) -> None:
    file = newest / "state.json"
    state = json.loads(file.read_text()) | change
    file.write_text(json.dumps(state | ({"checksum": state_checksum(state)} if signed else {})))
    with pytest.raises(CheckpointError, match="damaged"):
        verify(newest)
    assert resumed(newest, []).step == 2


@pytest.mark.parametrize("missing", ["checksum", "step", "files", "frozen"])
def test_a_missing_field_is_damage(newest: Path, missing: str) -> None:
    file = newest / "state.json"
    state = json.loads(file.read_text())
    del state[missing]
    file.write_text(json.dumps(state if missing == "checksum" else state | {"checksum": state_checksum(state)}))
    the_older_one_serves(newest, "state.json")


@pytest.mark.parametrize("version", [1, 2])
def test_an_earlier_version_is_named(newest: Path, version: int) -> None:
    file = newest / "state.json"
    state = {k: v for k, v in json.loads(file.read_text()).items() if k != "checksum"}
    file.write_text(json.dumps(state | {"version": version}))
    with pytest.raises(CheckpointError, match=f"version {version}; this program reads version 3"):
        verify(newest)


def test_a_disk_that_fails_while_the_newest_is_read_costs_that_one_alone(
    newest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = checkpoint.hash_file

    def fails(file: Path) -> str:
        if file == newest / "optimizer.safetensors":
            raise OSError(5, "Input/output error")
        return original(file)

    monkeypatch.setattr(checkpoint, "hash_file", fails)
    the_older_one_serves(newest, "optimizer.safetensors")


FULL = """
import resource, signal, sys
from pathlib import Path
import torch
from trainer.checkpoint import save
model = torch.nn.Linear(300, 300)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(300)).sum().backward()
optimizer.step()
save(Path(sys.argv[1]), step=1, model=model, optimizer=optimizer, cursor={})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
save(Path(sys.argv[1]), step=2, model=model, optimizer=optimizer, cursor={})
"""


@pytest.mark.parametrize("limit", [100, 400_000])  # in the weights, in the moments
def test_a_full_disk_is_named_and_left_as_it_was(tmp_path: Path, limit: int) -> None:
    found = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path), str(limit)], capture_output=True, text=True, check=False
    )
    said = found.stderr.splitlines()[-1]
    folder = tmp_path / "checkpoints"
    assert said.startswith("OSError")
    assert f"{folder / 'step-00000002'} cannot be written (File too large). The older checkpoints" in said
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    verify(folder / "step-00000001")
