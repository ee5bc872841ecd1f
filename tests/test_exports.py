"""What an export may replace, and what stays when the disk is full."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.released import whole_class, write_source
from tests.tiny import tiny_model
from trainer import adapters
from trainer.exports import MARK
from trainer.lora import add_adapters
from trainer.tensors import save_file as save_ours
from trainer.weights import export, load_weights

HOW: dict[str, Any] = {"tokenizer_dir": None, "eos_token_ids": [1]}


def write_adapter(out: Path, *, source: Path | None = None) -> Path:
    model = tiny_model()
    if source is not None:
        load_weights(model, source)
    add_adapters(model, rank=2, alpha=4.0, seed=0)
    return adapters.export(out, model=model, source=source, rank=2, alpha=4.0)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def without_mark(folder: Path) -> None:
    """As other programs, and earlier versions of this one, write folders."""
    (folder / MARK).unlink()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with an adapter; its record has the name of a model's configuration."""
    folder = tmp_path / "run"
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000001" / "model.safetensors").write_bytes(b"state")
    for name in ("config.json", "metrics.jsonl", ".lock"):
        (folder / name).write_text("{}", encoding="utf-8")
    write_adapter(folder / "adapter")
    return folder


def test_a_run_is_never_replaced(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, elsewhere = write_source(tmp_path / "source", kind="text"), write_adapter(tmp_path / "adapter")
    before = contents(run)
    with pytest.raises(ValueError, match="holds the source"):
        adapters.merge(source, run / "adapter", run)
    with pytest.raises(ValueError, match="holds the source"):
        adapters.merge(source, run / "adapter", run / "adapter")
    for write in (
        lambda: adapters.merge(source, elsewhere, run),
        lambda: export(run, model=tiny_model(), **HOW),
        lambda: write_adapter(run),
        lambda: export(run / "checkpoints", model=tiny_model(), **HOW),
        lambda: export(run / "checkpoints" / "step-00000001", model=tiny_model(), **HOW),
    ):
        with pytest.raises(ValueError, match=r"is not an (export|adapter) that this program wrote.*choose another"):
            write()
    assert contents(run) == before
    monkeypatch.chdir(run / "adapter")
    with pytest.raises(ValueError, match="holds the source"):
        adapters.merge(source, Path(), Path("../../run"))


def add_notes(folder: Path) -> None:
    (folder / "notes.md").write_text("mine", encoding="utf-8")


def add_a_template(folder: Path) -> None:
    (folder / "mine.jinja").touch()


def damage_the_mark(folder: Path) -> None:
    (folder / MARK).write_text('{"not": ["a list"]}', encoding="utf-8")


def add_a_folder(folder: Path) -> None:
    (folder / "onnx").mkdir()


def add_foreign_tensors(folder: Path) -> None:
    save_file({"x": torch.ones(1)}, folder / "model-mine.safetensors")


def add_a_damaged_file(folder: Path) -> None:
    (folder / "model-mine.safetensors").write_bytes(b"{}")


@pytest.mark.parametrize(
    "change",
    [without_mark, damage_the_mark, add_notes, add_a_template, add_a_folder, add_foreign_tensors, add_a_damaged_file],
)
@pytest.mark.parametrize("kind", ["export", "adapter"])
def test_what_others_wrote_or_added_to_is_not_replaced(tmp_path: Path, kind: str, change: Any) -> None:
    def write() -> Path:
        out = tmp_path / "out"
        return export(out, model=tiny_model(), **HOW) if kind == "export" else write_adapter(out)

    out = write()
    write()
    change(out)
    before = contents(out)
    with pytest.raises(ValueError, match=f"is not an {kind} that this program wrote"):
        write()
    assert contents(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_downloaded_model_an_adapter_and_a_link_are_not_replaced(tmp_path: Path) -> None:
    whole_class("text")(tiny_model().config).save_pretrained(tmp_path / "theirs")
    write_adapter(tmp_path / "adapter")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(export(tmp_path / "mine", model=tiny_model(), **HOW))
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("theirs", "adapter", "file", "link", "dangling"):
        with pytest.raises(ValueError, match="is not an export that this program wrote"):
            export(tmp_path / name, model=tiny_model(), **HOW)
    with pytest.raises(ValueError, match="is not an adapter that this program wrote"):
        write_adapter(tmp_path / "mine")


def test_an_empty_folder_and_what_a_run_exported_before_are_replaced(tmp_path: Path, run: Path) -> None:
    (tmp_path / "empty").mkdir()
    export(tmp_path / "empty", model=tiny_model(), **HOW)
    export(run / "export", model=tiny_model(seed=1), **HOW)
    for folder in (run / "export", run / "adapter"):
        without_mark(folder)  # earlier versions did not write it
    export(run / "export", model=tiny_model(seed=2), **HOW)
    write_adapter(run / "adapter")
    stored = load_file(run / "export" / "model.safetensors")["model.norm.weight"]
    assert torch.equal(stored, tiny_model(seed=2).model.norm.weight)
    model = whole_class("text").from_pretrained(run / "export")
    assert torch.equal(model.state_dict()["model.norm.weight"], stored)


LIMITED = """
import resource, signal, sys
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)), -1))
from trainer import adapters
sys.exit(adapters.main())
"""


@pytest.mark.parametrize(("limit", "file"), [(50_000, ".safetensors"), (100, "config.json")])
def test_a_full_disk_leaves_the_former_export_and_names_the_file(tmp_path: Path, limit: int, file: str) -> None:
    pytest.importorskip("resource", reason="limits of file sizes are POSIX's")
    source = write_source(tmp_path / "source", kind="text")
    adapter = write_adapter(tmp_path / "adapter", source=source)
    if limit < 1000:  # the weights fit, and what lies beside them does not
        (source / "model.safetensors.index.json").unlink()
        for part in source.glob("*.safetensors"):
            part.unlink()
        save_file({}, source / "model.safetensors")
        save_file({}, adapter / adapters.TENSORS)
    out = export(tmp_path / "merged", model=tiny_model(), **HOW)
    before = contents(tmp_path)
    command = ["merge", "--adapter", str(adapter), "--source", str(source), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(limit), *command],
        capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "File too large" in done.stderr
    assert f"{file}" in done.stderr
    assert contents(tmp_path) == before


def test_a_state_file_that_does_not_fit_on_the_disk_is_named(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("/dev/full is Linux's")
    with pytest.raises(OSError, match=r"No space left.*/dev/full"):
        save_ours({"x": torch.ones(100_000)}, Path("/dev/full"))


GENERATIONS: list[tuple[str, Any]] = [
    ('{"eos_token_id": 5}', [5, 1, 7]),
    ('{"eos_token_id": [5]}', [5, 1, 7]),
    ("{}", [1, 7]),
    ("null", [1, 7]),
    ('{"eos_token_id": null}', [1, 7]),
    ("[]", "an object is expected"),
    ("5", "an object is expected"),
    ('{"eos', "not JSON"),
    ('{"eos_token_id": "5"}', "not a number or a list of numbers"),
    ('{"eos_token_id": [5, "x"]}', "not a number or a list of numbers"),
    ('{"eos_token_id": {"a": 5}}', "not a number or a list of numbers"),
]


@pytest.mark.parametrize(("content", "expected"), GENERATIONS)
def test_a_generation_config_of_any_form_is_read_or_named(tmp_path: Path, content: str, expected: Any) -> None:
    source = write_source(tmp_path / "source", kind="text")
    adapter = write_adapter(tmp_path / "adapter", source=source)
    (adapter / "generation_config.json").write_text(content, encoding="utf-8")
    if isinstance(expected, list):
        out = adapters.merge(source, adapter, tmp_path / "merged")
        found = json.loads((out / "generation_config.json").read_text(encoding="utf-8"))
        assert found["eos_token_id"] == expected
        return
    with pytest.raises(ValueError, match=rf"adapter/generation_config\.json: .*{expected}"):
        adapters.merge(source, adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("settings", ["{}", '{"eos_token": "x"}'])
@pytest.mark.parametrize("content", ["{}", "[]", "\xff"])
def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path, content: str, settings: str) -> None:
    source = write_source(tmp_path / "source", kind="text")
    adapter = write_adapter(tmp_path / "adapter", source=source)
    (adapter / "tokenizer.json").write_text(content, encoding="latin-1")
    (adapter / "tokenizer_config.json").write_text(settings, encoding="utf-8")
    with pytest.raises(ValueError, match=r"adapter: tokenizer\.json or tokenizer_config\.json cannot be read"):
        adapters.merge(source, adapter, tmp_path / "merged")


@pytest.mark.parametrize("name", [5, None])
def test_an_index_that_names_no_files_is_refused(tmp_path: Path, name: Any) -> None:
    source = write_source(tmp_path / "source", kind="text")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}), encoding="utf-8")
    with pytest.raises(ValueError, match=f"has no {name}"):
        load_weights(tiny_model(), source)
