"""Everything that comes from the hub comes from it over HTTP here, by the real client, from a hub of the test's own."""

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipeline.tokenizer import open_tokenizer
from tests.hub import ONE, TWO, Hub, serve
from tests.training import ROOT, final_bytes, make_base, metrics, run
from trainer import hub, inputs, weights
from trainer.exports import MARK
from trainer.kernels import select
from trainer.model import Qwen3_5ForCausalLM
from trainer.record import default_folder
from trainer.settings import Settings
from trainer.sizes import resolve_config
from trainer.world import World

TINY = "o/tiny"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards, and two sets of weights for them."""
    folder = make_base(tmp_path_factory.mktemp("hub"))
    config = resolve_config(f"random:{folder / 'tiny.json'}")
    for seed, commit in enumerate((ONE, TWO)):
        model = Qwen3_5ForCausalLM(config, kernels=select(torch.device("cpu")))
        model.init_weights(seed=seed)
        weights.export(folder / commit, model=model, tokenizer_dir=None, eos_token_ids=[1])
    return folder


@pytest.fixture
def models(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Hub, Callable[[], None]]]:
    """A hub with the first weights, and what takes it off the network."""
    there = Hub(models={TINY: {ONE: base / ONE}})
    with ExitStack() as running:
        env = running.enter_context(serve(there, home=tmp_path / "home"))
        monkeypatch.setenv("NO_PROXY", env["NO_PROXY"])
        constants = huggingface_hub.constants  # what HF_ENDPOINT sets when the client is imported
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, env["HF_ENDPOINT"])
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", env["HF_ENDPOINT"])
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        yield there, running.close


def settings(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "config.json").read_text())["settings"])


Models = tuple[Hub, Callable[[], None]]


def test_a_run_keeps_the_commit_it_began_with(
    base: Path, tmp_path: Path, models: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    there, _ = models
    words = ("--model", TINY, "--schedule", "constant")
    assert run(base, tmp_path / "hub", *words, "--steps", "2") == 0
    assert settings(tmp_path / "hub")["model"] == f"{TINY}@{ONE}"
    there.models[TINY][TWO] = base / TWO
    assert run(base, tmp_path / "new", *words, "--steps", "2") == 0
    assert settings(tmp_path / "new")["model"] == f"{TINY}@{TWO}"
    assert run(base, tmp_path / "hub", *words, "--steps", "4", "--resume") == 0
    assert settings(tmp_path / "hub")["model"] == f"{TINY}@{ONE}"
    folder = ("--model", str(base / ONE), "--schedule", "constant", "--steps", "4")
    assert run(base, tmp_path / "folder", *folder) == 0
    assert final_bytes(tmp_path / "hub") == final_bytes(tmp_path / "folder")
    branch = ("--model", f"{TINY}@main", "--schedule", "constant")
    assert run(base, tmp_path / "hub", *branch, "--steps", "5", "--resume") == 0
    assert settings(tmp_path / "hub")["model"] == f"{TINY}@{ONE}"
    capsys.readouterr()
    other = ("--model", f"{TINY}@{TWO}", "--schedule", "constant")
    assert run(base, tmp_path / "hub", *other, "--steps", "6", "--resume") == 2
    assert f"--model: '{TINY}@{ONE}' -> '{TINY}@{TWO}'" in capsys.readouterr().err


def test_a_resumed_adapter_stands_on_the_commit_it_began_with_and_names_it(
    base: Path, tmp_path: Path, models: Models
) -> None:
    there, _ = models
    words = ("--model", TINY, "--method", "lora", "--schedule", "constant")
    assert run(base, tmp_path / "run", *words, "--steps", "1") == 0
    there.models[TINY][TWO] = base / TWO
    assert run(base, tmp_path / "run", *words, "--steps", "3", "--resume") == 0
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (TINY, ONE)
    assert run(base, tmp_path / "whole", *words[:1], f"{TINY}@{ONE}", *words[2:], "--steps", "3") == 0
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_what_was_downloaded_serves_without_a_network(base: Path, tmp_path: Path, models: Models) -> None:
    there, unplug = models
    assert hub.weights_folder(TINY) is not None
    unplug()
    asked = len(there.asked)
    assert run(base, tmp_path / "run", "--model", TINY, "--steps", "1") == 0
    assert settings(tmp_path / "run")["model"] == f"{TINY}@{ONE}"
    assert len(there.asked) == asked


@pytest.mark.parametrize("get", [hub.pin, hub.weights_folder])
def test_without_a_network_it_is_said_why_and_what_to_pass_but_not_how_to_call_the_client(
    models: Models, get: Callable[[str], object]
) -> None:
    _, unplug = models
    unplug()
    cause = r"http://127\.0\.0\.1:\d+ cannot be reached \(.*Connection refused.*\)"
    words = rf"^--model o/other: {cause}, and the local cache does not hold it\. Pass a folder .*random:SIZE as well\)$"
    with pytest.raises(ValueError, match=words) as told:
        get("o/other")
    assert "local_files_only" not in str(told.value)


def test_what_the_hub_says_of_a_file_that_it_lacks_is_kept(models: Models, tmp_path: Path) -> None:
    there, _ = models
    there.models["o/empty"] = {ONE: tmp_path}
    with pytest.raises(ValueError, match=r"^--model o/empty: neither http://.* gave it \(.*404 .*\)\. Pass a folder"):
        hub.pin("o/empty")


def test_names_revisions_and_what_the_hub_does_not_have(base: Path, models: Models) -> None:
    there, _ = models
    there.models[TINY][TWO] = base / TWO
    assert hub.pin(f"{TINY}@main") == hub.pin(TINY) == f"{TINY}@{TWO}"
    assert hub.pin(f"{TINY}@{ONE}") == f"{TINY}@{ONE}"
    assert [hub.pin(same) for same in ("random:4B", str(base / ONE))] == ["random:4B", str(base / ONE)]
    for spec, words in (
        (f"{TINY}@v9", f"--model {TINY}@v9: the hub has this model, but no such revision"),
        ("o/none", "neither a folder here nor a model on the hub"),
        ("nowhere", "no such folder, and not a hub id of the form OWNER/NAME"),
        ("./o/tiny", "no such folder, and not a hub id"),
        ("~/o/tiny", "no such folder, and not a hub id"),
    ):
        with pytest.raises(ValueError, match=words):
            hub.pin(spec)


def test_a_commit_that_the_hub_has_no_more_is_taken_from_the_cache(base: Path, tmp_path: Path, models: Models) -> None:
    there, _ = models
    words = ("--model", TINY, "--schedule", "constant")
    assert run(base, tmp_path / "run", *words, "--steps", "1") == 0
    there.models[TINY] = {TWO: base / TWO}
    assert run(base, tmp_path / "run", *words, "--steps", "2", "--resume") == 0
    assert settings(tmp_path / "run")["model"] == f"{TINY}@{ONE}"
    with pytest.raises(ValueError, match="does not hold this commit any more, and the local cache does not hold it"):
        hub.pin(f"{TINY}@{'3' * 40}")


def test_what_is_a_folder_on_rank_0_alone_is_refused(
    base: Path, tmp_path: Path, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where ranks run in different folders: rank 0 found a folder of that name, this one asks the hub."""
    monkeypatch.setattr(inputs, "on_rank_0", lambda *_: (TINY, True))
    found = SimpleNamespace(manifest=SimpleNamespace(recipe={"tokenizer": {"model": TINY}}))
    world = World(rank=1, size=2, local_size=1, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=f"--model {TINY}: no folder on rank 1, a folder on rank 0"):
        inputs.pin_model(Settings(shards=base / "packed"), cast(Any, found), world)


def test_a_merge_names_its_own_option(models: Models, capsys: pytest.CaptureFixture[str]) -> None:
    for source in ("nowhere", "o/none"):
        with pytest.raises(ValueError, match=f"^--source {source}: "):
            hub.weights_folder(source, flag="--source")


def test_only_a_checkpoints_files_are_fetched(base: Path, tmp_path: Path, models: Models) -> None:
    there, _ = models
    folder = tmp_path / "more"
    folder.mkdir()
    for path in (base / ONE).iterdir():
        (folder / path.name).symlink_to(path)
    for name in ("pytorch_model.bin", "README.md", "merges.txt", "chat_template.jinja"):
        (folder / name).write_text("x")
    there.models[TINY] = {TWO: folder}
    found = hub.weights_folder(TINY)
    assert found is not None
    assert {path.name for path in found.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "merges.txt", "chat_template.jinja", MARK,
    }  # fmt: skip


def test_a_tokenizer_that_was_downloaded_serves_without_a_network(models: Models) -> None:
    there, unplug = models
    there.models["o/words"] = {TWO: ROOT / "data" / "sample"}
    online = open_tokenizer("o/words")
    unplug()
    assert open_tokenizer("o/words") == online
    with pytest.raises(ValueError, match=r"--tokenizer o/none: .*--tokenizer data/sample"):
        open_tokenizer("o/none")


def test_the_folder_of_a_run_is_named_without_the_commit() -> None:
    found = default_folder(model=f"Qwen/Qwen3.5-0.8B@{ONE}", dataset_id="abcdefgh12", today=datetime.date(2026, 1, 2))
    assert found == Path("runs/2026-01-02-Qwen3.5-0.8B-abcdefgh")


def test_chats_and_a_tokenizer_of_the_hub_are_packed_and_name_their_commit(tmp_path: Path) -> None:
    """datasets downloads the split; the recipe holds its commit and the digests of its files."""
    chats = tmp_path / "chats"
    (chats / "data").mkdir(parents=True)
    turns = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]
    for split in ("train_sft", "test_sft"):
        pq.write_table(pa.table({"messages": [turns] * 5}), chats / "data" / f"{split}-00000-of-00001.parquet")
    (chats / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        "  - {split: train_sft, path: data/train_sft-*}\n  - {split: test_sft, path: data/test_sft-*}\n---\n"
    )
    there = Hub(models={"o/words": {TWO: ROOT / "data" / "sample"}}, datasets={"o/chats": {ONE: chats}})
    words = ("--source", "o/chats", "--tokenizer", "o/words", "--max-tokens", "64", "--out", str(tmp_path / "packed"))
    with serve(there, home=tmp_path / "home") as env:
        pack = (sys.executable, "-m", "pipeline.pack", *words, "--cache-dir", str(tmp_path / "cache"))
        done = subprocess.run(pack, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    recipe = json.loads((tmp_path / "packed" / "manifest.json").read_text())["recipe"]
    (source,) = recipe["source"]
    assert (source["id"], source["revision"], source["split"]) == ("o/chats", ONE, "train_sft")
    assert [file["name"] for file in source["files"]] == ["data/train_sft-00000-of-00001.parquet"]
    assert recipe["tokenizer"]["model"] == "o/words"
