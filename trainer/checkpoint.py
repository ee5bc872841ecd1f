"""Training state on disk: save, find, check, resume.

    save(run_dir, step=12, model=model, optimizer=optimizer, cursor={...}, extra={...})
    state = load_latest(run_dir, model=model, optimizer=optimizer, say=print)
    prune(run_dir, keep=2, last=12)

    RUN/checkpoints/step-00000012/
        model.safetensors       trained parameters: the optimizer's fp32 master where there is one, else as they are
        optimizer.safetensors   the optimizer's other tensors, under the parameters' names
        rng.safetensors         states of torch's generators
        state.json              step, cursor, the rest of the optimizer; size and xxh3_128 of the files above, and a
                                checksum of itself

Frozen parameters are not in it: a LoRA run's checkpoint is its adapters, and resuming reads the model's own weights
again; a digest of some of their values tells whether they are still the same: other weights, or further trained ones,
are noticed, a change of a few values may not be.

Guarantees: after a kill at any moment a folder `step-*` is complete; a save that fails leaves nothing, what a kill
leaves is removed by the next one. Loading checks every hash first and restores everything bit by bit. Nothing is
pickled.
Costs: 12 bytes on disk for each trained parameter under AdamW, whatever the precision; tensors are written and read one
at a time; hashing runs at several GB a second.

Hugging Face weights, in and out, are in `trainer.weights`.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor, nn

from pipeline.shards import hash_file
from trainer.folders import LEFTOVER, OLD, publish_folder, restore_former, start_folder
from trainer.optimizer import MASTER, masters
from trainer.tensors import save_file

STATE_VERSION = 3
"""Of the folder's layout and of state.json; a reader refuses any other."""

STATE = "state.json"
MODEL, OPTIMIZER, RNG = "model.safetensors", "optimizer.safetensors", "rng.safetensors"
FILES = (MODEL, OPTIMIZER, RNG)
FIELDS: dict[str, Any] = {
    "step": int, "cursor": dict, "extra": dict, "frozen": str | None, "optimizer": str, "param_groups": list,
    "masters": dict, "files": dict,
}  # fmt: skip
"""Fields of state.json beside version and checksum, and what each has to be."""
FROZEN_VALUES = 4096
"""About how many values of each frozen parameter are hashed; between two thirds and twice as many."""

_STEP = re.compile(r"step-(\d{8,})")
_LONG = {"F64": "torch.float64", "F32": "torch.float32", "F16": "torch.float16", "BF16": "torch.bfloat16"}


class CheckpointError(ValueError):
    """A checkpoint that is damaged, foreign or does not fit the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """What a checkpoint holds beside tensors."""

    step: int
    """Optimizer steps done."""
    cursor: dict[str, Any]
    """Place in the endless stream of rows, as it was given to `save`."""
    extra: dict[str, Any]
    """Whatever else was given to `save`."""
    path: Path
    """Folder that it was read from."""


def save(
    run_dir: Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    cursor: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write RUN/checkpoints/step-XXXXXXXX and return it; `cursor` and `extra` are JSON.

    A complete or damaged folder of the same step is replaced. Raises OSError naming the folder where the disk is full;
    what was written until then is removed, other checkpoints stay.
    """
    final = _folder(run_dir) / f"step-{step:08d}"
    try:
        _restore_formers(run_dir)
        for leftover in _entries(run_dir):
            if leftover.name.startswith(LEFTOVER):
                shutil.rmtree(leftover)
        temporary = start_folder(final)
        try:
            _write(temporary, model, optimizer, {"step": step, "cursor": dict(cursor), "extra": dict(extra or {})})
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)  # it may fill the disk
            raise
        publish_folder(temporary, final)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{final} cannot be written ({error.strerror or error}). The older checkpoints beside it are untouched: "
            "see to the disk, then go on from the newest of them with --resume.",
        ) from error
    return final


def steps(run_dir: Path) -> list[Path]:
    """Folders of the run's checkpoints, oldest first."""
    found = [(int(match[1]), path) for path in _entries(run_dir) if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def latest(run_dir: Path) -> Path | None:
    """Folder of the newest checkpoint, or None where nothing was saved yet."""
    return steps(run_dir)[-1] if steps(run_dir) else None


def step_of(path: Path) -> int:
    """Number of the step after which a checkpoint was saved."""
    return int(path.name.removeprefix("step-"))


def load_latest(
    run_dir: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, say: Callable[[str], None]
) -> TrainingState | None:
    """Restore the newest checkpoint that is whole; None where nothing was saved yet.

    A damaged one is passed over only after `say` was told which file is wrong and where the run goes on.
    Raises CheckpointError where none is whole.
    """
    _restore_formers(run_dir)
    reasons: list[str] = []
    for path in reversed(steps(run_dir)):
        try:
            state = verify(path)
        except CheckpointError as error:
            reasons.append(str(error))
            continue
        if reasons:
            say("\n".join([*reasons, f"Going on from the older checkpoint {path}, which is whole."]))
        return _restore(path, state, model, optimizer)
    if reasons:
        raise CheckpointError("\n".join([*reasons, f"No checkpoint in {_folder(run_dir)} is whole: start a new run."]))
    return None


def load(path: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingState:
    """Check every hash, then restore parameters, optimizer and torch's generators bit by bit.

    Raises CheckpointError for a damaged checkpoint, or one of another model or optimizer; then nothing is changed.
    """
    return _restore(path, verify(path), model, optimizer)


def verify(path: Path) -> dict[str, Any]:
    """Check sizes and hashes of a checkpoint's files; return state.json's content.

    Raises CheckpointError naming the file, what was expected and what was found.
    """
    state = _read_state(path / STATE)
    for name, expected in state["files"].items():
        file = path / name
        try:
            num_bytes, xxh3_128 = expected["bytes"], expected["xxh3_128"]
            found = file.stat().st_size if file.is_file() else "no file"
            digest = hash_file(file) if found == num_bytes else None
        except (OSError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file}: cannot be checked ({error!r}); the checkpoint is damaged.") from error
        if found != num_bytes:
            raise CheckpointError(f"{file}: {num_bytes} bytes expected, found {found}; it is damaged.")
        if digest != xxh3_128:
            raise CheckpointError(f"{file}: hash {xxh3_128} expected, found {digest}; it is damaged.")
    return state


def state_checksum(state: Mapping[str, Any]) -> str:
    """xxh3_128 of the canonical JSON of state.json's content without its checksum."""
    body = {name: value for name, value in state.items() if name != "checksum"}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(canonical.encode())


def prune(run_dir: Path, *, keep: int, last: int | None = None) -> None:
    """Remove all but the newest `keep` checkpoints (at least 1).

    `last` is the step just saved: later ones are damaged, the run went on from an older one, so they do not count.
    """
    if keep < 1:
        raise ValueError(f"--keep {keep}: the newest checkpoint is always kept; use 1 or more")
    counted = [path for path in steps(run_dir) if last is None or step_of(path) <= last]
    for path in counted[:-keep]:
        # Renamed first: a kill while removing leaves no half a checkpoint under its name.
        doomed = path.with_name(f"{LEFTOVER}{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)


def _folder(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def _entries(run_dir: Path) -> list[Path]:
    return list(_folder(run_dir).iterdir()) if _folder(run_dir).is_dir() else []


def _write(temporary: Path, model: nn.Module, optimizer: torch.optim.Optimizer, place: dict[str, Any]) -> None:
    """All files of a checkpoint; `place` are the fields of state.json that say how far the run is."""
    tensors, groups = _optimizer_parts(model, optimizer)
    wide = masters(optimizer)
    parameters = _trained(model)
    save_file({name: wide.get(p, p).detach() for name, p in parameters.items()}, temporary / MODEL)
    save_file(tensors, temporary / OPTIMIZER)
    save_file(_generators(), temporary / RNG)
    state = {
        "version": STATE_VERSION,
        **place,
        "frozen": _frozen_digest(model),
        "optimizer": type(optimizer).__name__,
        "param_groups": groups,
        "masters": {name: str(p.dtype) for name, p in parameters.items() if p in wide},
        "files": {
            name: {"bytes": (temporary / name).stat().st_size, "xxh3_128": hash_file(temporary / name)}
            for name in FILES
        },
    }
    state = json.loads(json.dumps(state))  # what a reader will find: no tuples, only strings as keys
    text = json.dumps(state | {"checksum": state_checksum(state)}, indent=1) + "\n"
    (temporary / STATE).write_text(text, encoding="utf-8")


def _read_state(file: Path) -> dict[str, Any]:
    """The content of state.json. Raises CheckpointError where it is damaged or of another version."""
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        version = state["version"]
        checksum = state["checksum"] if version == STATE_VERSION else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error!r}); the checkpoint is damaged.") from error
    if version != STATE_VERSION:
        raise CheckpointError(f"{file}: version {version}; this program reads version {STATE_VERSION}.")
    if (found := state_checksum(state)) != checksum:
        raise CheckpointError(f"{file}: checksum {checksum} expected, found {found}; it is damaged.")
    wrong = [name for name, kind in FIELDS.items() if name not in state or not isinstance(state[name], kind)]
    if not wrong and state["files"].keys() != set(FILES):
        wrong = ["files"]
    if not wrong and not all(isinstance(group, dict) and "params" in group for group in state["param_groups"]):
        wrong = ["param_groups"]
    if wrong:
        raise CheckpointError(f"{file}: {', '.join(wrong)} missing or not what they have to be; it is damaged.")
    return dict(state)


def _restore(path: Path, state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingState:
    """`load` without the hashes, which have been checked."""
    parameters = _trained(model)
    with safe_open(path / MODEL, framework="pt") as opened:
        _same_tensors(path / MODEL, opened, parameters, narrow=state["masters"])
        _same_optimizer(path, state, optimizer, _optimizer_parts(model, optimizer)[1])
        if state["frozen"] != _frozen_digest(model):
            raise CheckpointError(
                f"{path / STATE}: the model's frozen weights are not those that the run began with; pass the --model "
                "of the run, in the revision that it had."
            )
        moments = _load_file(path / OPTIMIZER)
        with torch.no_grad():
            for name, parameter in parameters.items():
                tensor = opened.get_tensor(name)
                parameter.copy_(tensor)
                if name in state["masters"]:
                    moments[f"{name}/{MASTER}"] = tensor
    optimizer.load_state_dict(_optimizer_state(moments, state["param_groups"]))
    generators = _load_file(path / RNG)
    torch.set_rng_state(generators["cpu"])
    if "cuda" in generators and torch.cuda.is_available():
        torch.cuda.set_rng_state(generators["cuda"])
    return TrainingState(step=state["step"], cursor=state["cursor"], extra=state["extra"], path=path)


def _restore_formers(run_dir: Path) -> None:
    """Give a checkpoint that a killed save was about to replace its name back."""
    for path in _entries(run_dir):
        if path.name.startswith(OLD):
            restore_former(path.with_name(path.name.removeprefix(OLD)))


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _frozen_digest(model: nn.Module) -> str | None:
    """Hash over names, types, shapes and evenly spread values of all frozen parameters; None where there is none.

    Sees whatever changes most values of some parameter, such as training it; misses a change of values between those
    that are taken. One copy of some kB from the device for each parameter.
    """
    digest = hashlib.sha256()
    frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    for name, parameter in sorted(frozen.items()):
        digest.update(f"{name} {parameter.dtype} {list(parameter.shape)}".encode())
        digest.update(spread(parameter).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest() if frozen else None


def spread(tensor: Tensor) -> Tensor:
    """About `FROZEN_VALUES` values of a tensor, evenly spread, or all of a small one; in one dimension."""
    stride = tensor.numel() // FROZEN_VALUES | 1  # odd: else it would take the same few columns in every row
    return tensor.reshape(-1)[::stride].contiguous()


def _load_file(file: Path) -> dict[str, Tensor]:
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping


def _generators() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _optimizer_parts(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The optimizer's state as tensors under "parameter name/kind", and its groups with names for parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    tensors = {
        f"{names[id(parameter)]}/{kind}": torch.as_tensor(value).detach()
        for parameter, kinds in optimizer.state.items()
        for kind, value in kinds.items()
        if kind != MASTER  # it is in the model's file
    }
    return tensors, groups


def _optimizer_state(tensors: dict[str, Tensor], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """What `load_state_dict` takes: parameters numbered over all groups."""
    number = {name: i for i, name in enumerate(name for group in groups for name in group["params"])}
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, kind = key.rsplit("/", 1)
        state.setdefault(number[name], {})[kind] = tensor
    numbered = [
        {k: tuple(v) if isinstance(v, list) else v for k, v in group.items()}  # JSON knows no tuples: betas
        | {"params": [number[name] for name in group["params"]]}
        for group in groups
    ]
    return {"state": state, "param_groups": numbered}


def _same_tensors(file: Path, opened: Any, parameters: Mapping[str, Tensor], *, narrow: Mapping[str, str]) -> None:
    """Raise CheckpointError unless names, shapes and dtypes are the model's own; reads no tensor.

    `narrow` are the dtypes of the parameters whose fp32 master is in the file.
    """
    found: dict[str, str] = {}
    for name in opened.keys():  # noqa: SIM118 - not a mapping
        tensor = opened.get_slice(name)
        dtype = narrow.get(name, _LONG.get(tensor.get_dtype(), "of another type"))
        found[name] = f"{dtype} {list(tensor.get_shape())}"
    wanted = {name: f"{p.dtype} {list(p.shape)}" for name, p in parameters.items()}
    for name in sorted(found.keys() | wanted.keys()):
        have, want = found.get(name, "nothing"), wanted.get(name, "nothing")
        if have != want:
            raise CheckpointError(
                f"{file}: {name} is {have}, the model has {want}; resume with the --model, --method and --precision "
                "of the run."
            )


def _same_optimizer(
    path: Path, state: dict[str, Any], optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> None:
    same = state["optimizer"] == type(optimizer).__name__
    if not same or [group["params"] for group in state["param_groups"]] != [group["params"] for group in groups]:
        raise CheckpointError(
            f"{path / STATE}: the optimizer or its parameter groups differ from this run's; resume with the --method "
            "and --optimizer of the run."
        )
