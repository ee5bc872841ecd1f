"""Training state: bit-equal resume, atomic folders, damage found and named."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tiny import batch_of, random_documents, tiny_model
from trainer import checkpoint
from trainer.checkpoint import CheckpointError, latest, load, load_latest, prune, save, steps, verify
from trainer.lora import add_adapters
from trainer.model import Qwen3_5ForCausalLM
from trainer.optimizer import make_optimizer

CURSOR = {"version": 1, "rows_seen": 3}


def optimizer_of(model: Qwen3_5ForCausalLM) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))


def train(model: Qwen3_5ForCausalLM, optimizer: torch.optim.Optimizer, *, first: int, last: int) -> list[float]:
    """Steps first..last; the learning rate changes, and the data come from torch's generator."""
    losses = []
    for step in range(first, last + 1):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 / step
        seed = int(torch.randint(0, 1000, ()))
        loss = model(batch_of(random_documents([20, 11], seed=seed)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, Qwen3_5ForCausalLM, torch.optim.AdamW]:
    """A run folder, and a model and optimizer after two steps."""
    torch.manual_seed(7)
    model = tiny_model()
    optimizer = optimizer_of(model)
    train(model, optimizer, first=1, last=2)
    return tmp_path / "run", model, optimizer


Run = tuple[Path, Qwen3_5ForCausalLM, torch.optim.Optimizer]


def fresh() -> tuple[Qwen3_5ForCausalLM, torch.optim.AdamW]:
    model = tiny_model(seed=99)
    return model, optimizer_of(model)


def save_step(run: Run, step: int) -> Path:
    folder, model, optimizer = run
    return save(folder, step=step, model=model, optimizer=optimizer, cursor=CURSOR, extra={"note": "é"})


def test_a_run_stopped_and_resumed_twice_equals_an_uninterrupted_one_bit_by_bit(run: Run) -> None:
    folder, model, optimizer = run
    save_step(run, 2)
    expected = train(model, optimizer, first=3, last=5)

    losses: list[float] = []
    for first, last in ((3, 3), (4, 5)):
        torch.manual_seed(first)  # another process starts from another state
        resumed, its_optimizer = fresh()
        state = load_latest(folder, model=resumed, optimizer=its_optimizer, say=pytest.fail)
        assert state is not None
        assert (state.step, state.cursor, state.extra) == (first - 1, CURSOR, {"note": "é"})
        losses += train(resumed, its_optimizer, first=first, last=last)
        save_step((folder, resumed, its_optimizer), last)

    assert losses == expected
    for (name, found), wanted in zip(resumed.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(found, wanted), name
    for found, wanted in zip(resumed.parameters(), model.parameters(), strict=True):
        for kind, tensor in optimizer.state[wanted].items():
            assert torch.equal(its_optimizer.state[found][kind], tensor), kind


def test_every_setting_of_the_optimizer_is_restored(run: Run) -> None:
    _, _, optimizer = run
    path = save_step(run, 2)
    model = tiny_model()
    other = torch.optim.AdamW([{**group, "params": []} for group in optimizer_of(model).param_groups], lr=1.0)
    for group, filled in zip(other.param_groups, optimizer_of(model).param_groups, strict=True):
        group.update(params=filled["params"], lr=0.5, betas=(0.1, 0.2), eps=1.0)
    load(path, model=model, optimizer=other)
    for found, wanted in zip(other.param_groups, optimizer.param_groups, strict=True):
        assert {k: v for k, v in found.items() if k != "params"} == {k: v for k, v in wanted.items() if k != "params"}


def test_dtypes_survive_a_resume(tmp_path: Path) -> None:
    model = tiny_model().to_dtype(torch.bfloat16)
    optimizer = optimizer_of(model)
    train(model, optimizer, first=1, last=1)
    path = save_step((tmp_path, model, optimizer), 1)
    resumed = tiny_model(seed=5).to_dtype(torch.bfloat16)
    load(path, model=resumed, optimizer=optimizer_of(resumed))
    for (name, found), wanted in zip(resumed.named_parameters(), model.parameters(), strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_and_adapters_are_resumed_bit_by_bit_in_the_middle_of_a_run(tmp_path: Path, dtype: torch.dtype) -> None:
    def begin(seed: int) -> tuple[Qwen3_5ForCausalLM, torch.optim.Optimizer]:
        model = tiny_model(seed=1).to_dtype(dtype)
        add_adapters(model, rank=3, alpha=6.0, seed=seed)
        return model, make_optimizer(model, lr=1e-2, weight_decay=0.1)

    torch.manual_seed(4)
    model, optimizer = begin(seed=0)
    train(model, optimizer, first=1, last=2)
    path = save_step((tmp_path, model, optimizer), 2)
    expected = train(model, optimizer, first=3, last=4)
    torch.manual_seed(5)
    resumed, its_optimizer = begin(seed=9)
    load(path, model=resumed, optimizer=its_optimizer)
    assert train(resumed, its_optimizer, first=3, last=4) == expected
    for (name, found), wanted in zip(resumed.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(found, wanted), name
        for kind, tensor in optimizer.state[wanted].items():
            assert torch.equal(its_optimizer.state[found][kind], tensor), (name, kind)
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sizes["model.safetensors"] + sizes["optimizer.safetensors"] < 12 * trained + 30_000  # and headers


def test_adapters_are_not_resumed_on_other_frozen_weights(tmp_path: Path) -> None:
    def begin(seed: int) -> tuple[Qwen3_5ForCausalLM, torch.optim.Optimizer]:
        model = tiny_model(seed=seed)
        add_adapters(model, rank=3, alpha=6.0, seed=0)
        return model, make_optimizer(model, lr=1e-2, weight_decay=0.1)

    path = save_step((tmp_path, *begin(seed=1)), 2)
    other, its_optimizer = begin(seed=2)
    before = {name: p.detach().clone() for name, p in other.named_parameters()}
    with pytest.raises(CheckpointError, match="frozen weights are not those that the run began with"):
        load(path, model=other, optimizer=its_optimizer)
    assert all(torch.equal(p, before[name]) for name, p in other.named_parameters())


@pytest.mark.parametrize("part", ["last tenth", "one column in ten"])
def test_adapters_are_not_resumed_on_a_base_that_was_trained_further_anywhere(tmp_path: Path, part: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(500, 400), torch.nn.Linear(400, 1))
    model[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model[1].parameters())
    path = save(tmp_path, step=1, model=model, optimizer=optimizer, cursor=CURSOR)
    load(path, model=model, optimizer=optimizer)
    weight = model[0].weight.detach()
    changed = weight[-40:] if part == "last tenth" else weight[:, 7::10]
    changed += 1e-3
    with pytest.raises(CheckpointError, match="frozen weights are not those that the run began with"):
        load(path, model=model, optimizer=optimizer)


@pytest.mark.parametrize(("saved", "here"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_a_checkpoint_of_another_precision_is_refused(tmp_path: Path, saved: str, here: str) -> None:
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    model = tiny_model().to_dtype(dtypes[saved])
    optimizer = make_optimizer(model, lr=1e-2, weight_decay=0.1)
    train(model, optimizer, first=1, last=1)
    path = save_step((tmp_path, model, optimizer), 1)
    other = tiny_model().to_dtype(dtypes[here])
    with pytest.raises(CheckpointError, match=r"resume with the --model, --method and --precision"):
        load(path, model=other, optimizer=make_optimizer(other, lr=1e-2, weight_decay=0.1))


def test_a_checkpoint_of_another_model_or_optimizer_is_refused_and_changes_nothing(run: Run) -> None:
    path = save_step(run, 2)
    for model in (tiny_model(hidden_size=32), tiny_model().to_dtype(torch.bfloat16), tiny_model(num_hidden_layers=3)):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with pytest.raises(CheckpointError, match="resume with the --model, --method and --precision"):
            load(path, model=model, optimizer=optimizer_of(model))
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    model = tiny_model(seed=3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(CheckpointError, match="optimizer or its parameter groups differ"):
        load(path, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_newest_checkpoint_is_found_by_number_not_by_name(run: Run) -> None:
    folder, _, _ = run
    assert latest(folder) is None
    assert load_latest(folder, model=fresh()[0], optimizer=fresh()[1], say=pytest.fail) is None
    for step in (100_000_000, 99_999_999, 2):
        save_step(run, step)
    (folder / "checkpoints" / "step-notes").mkdir()
    newest = latest(folder)
    assert newest is not None
    assert newest.name == "step-100000000"
    assert [path.name for path in steps(folder)] == ["step-00000002", "step-99999999", "step-100000000"]


def test_only_the_newest_are_kept(run: Run) -> None:
    folder, _, _ = run
    for step in (1, 2, 3):
        save_step(run, step)
    prune(folder, keep=2)
    assert len(list((folder / "checkpoints").iterdir())) == 2
    assert [path.name for path in steps(folder)] == ["step-00000002", "step-00000003"]
    with pytest.raises(ValueError, match="--keep 0"):
        prune(folder, keep=0)
    prune(folder, keep=5)
    assert len(steps(folder)) == 2


def test_pruning_never_takes_the_checkpoint_just_saved_for_a_damaged_later_one(run: Run) -> None:
    folder, model, optimizer = run
    for step in (5, 10):
        save_step(run, step)
    flip_a_bit(folder / "checkpoints" / "step-00000010" / "model.safetensors")
    state = load_latest(folder, model=model, optimizer=optimizer, say=lambda text: None)
    assert state is not None
    assert state.step == 5
    save_step(run, 7)
    prune(folder, keep=1, last=7)
    again = load_latest(folder, model=model, optimizer=optimizer, say=lambda text: None)
    assert again is not None
    assert again.step == 7


# --------------------------------------------------------------------------------------------- damage


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "rng.safetensors"])
@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_damage_is_found_and_the_file_named(run: Run, name: str, how: str) -> None:
    file = save_step(run, 2) / name
    if how == "flip":
        flip_a_bit(file)
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    model, optimizer = fresh()
    with pytest.raises(CheckpointError, match=f"{name}.*expected, found.*damaged"):
        load(file.parent, model=model, optimizer=optimizer)
    assert not optimizer.state


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "3", '{"version": 3}', "[" * 100_000])
def test_a_damaged_state_file_is_named(run: Run, content: str) -> None:
    path = save_step(run, 2)
    (path / "state.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"state\.json.*damaged"):
        verify(path)


def test_a_later_version_is_refused(run: Run) -> None:
    file = save_step(run, 2) / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), "version": 4}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="version 4; this program reads version 3"):
        verify(file.parent)


def test_an_older_whole_checkpoint_serves_only_with_a_word(run: Run) -> None:
    folder, _, _ = run
    save_step(run, 2)
    flip_a_bit(save_step(run, 4) / "model.safetensors")
    said: list[str] = []
    model, optimizer = fresh()
    state = load_latest(folder, model=model, optimizer=optimizer, say=said.append)
    assert state is not None
    assert state.step == 2
    assert len(said) == 1
    assert "step-00000004/model.safetensors" in said[0]
    assert "step-00000002" in said[0]

    flip_a_bit(folder / "checkpoints" / "step-00000002" / "rng.safetensors")
    with pytest.raises(CheckpointError, match=r"(?s)00000004.*00000002.*No checkpoint"):
        load_latest(folder, model=model, optimizer=optimizer, say=pytest.fail)


def test_saving_again_replaces_a_damaged_folder(run: Run) -> None:
    path = save_step(run, 2)
    flip_a_bit(path / "model.safetensors")
    verify(save_step(run, 2))
    assert [entry.name for entry in path.parent.iterdir()] == ["step-00000002"]


# --------------------------------------------------------------------------------- killed at any moment


class Killed(BaseException):
    """Stands for a kill: nothing in the program may catch it."""


@pytest.mark.parametrize("call", range(6))
def test_a_save_cut_short_anywhere_leaves_the_older_one_and_no_half_one(
    run: Run, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, _ = run
    save_step(run, 2)
    calls = iter(range(100))

    def dies_at_its_turn(name: str) -> None:
        original = getattr(checkpoint, name)

        def wrapped(*arguments: object, **keywords: object) -> object:
            if next(calls) == call:
                raise Killed
            return original(*arguments, **keywords)

        monkeypatch.setattr(checkpoint, name, wrapped)

    with monkeypatch.context():
        monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # a kill leaves no time to tidy up
        for name in ("save_file", "hash_file", "publish_folder"):
            dies_at_its_turn(name)
        with pytest.raises(Killed):
            save_step(run, 4)
    monkeypatch.undo()

    assert [path.name for path in steps(folder)] == ["step-00000002"]
    verify(folder / "checkpoints" / "step-00000002")
    save_step(run, 6)
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000006"]


def test_a_kill_while_a_checkpoint_is_replaced_does_not_cost_it(run: Run) -> None:
    folder, model, optimizer = run
    path = save_step(run, 2)
    for go_on in (
        lambda: load_latest(folder, model=model, optimizer=optimizer, say=pytest.fail),
        lambda: save_step(run, 4),
    ):
        path.rename(path.with_name(f".tmp-old-{path.name}"))
        go_on()
        verify(path)
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize("delay", [0.05, 0.21])
def test_a_process_killed_while_saving_leaves_only_whole_checkpoints(tmp_path: Path, delay: float) -> None:
    code = f"""
import torch
from pathlib import Path
from trainer.checkpoint import save, prune
model = torch.nn.Linear(600, 600)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(600)).sum().backward()
optimizer.step()
for step in range(1, 10**6):
    save(Path({str(tmp_path)!r}), step=step, model=model, optimizer=optimizer, cursor={{}})
    prune(Path({str(tmp_path)!r}), keep=3)
    print(step, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert steps(tmp_path)
    for path in steps(tmp_path):
        verify(path)
