"""Which weights an adapter was trained on.

    write_base(folder, weights, name="OWNER/NAME@COMMIT")     FOLDER/base_weights.json, when the adapter is written
    require_base(source, folder, say=print)                   before it is merged into a checkpoint

An adapter fits every checkpoint of the same shapes, and means something in its own base alone. The file holds a digest
of each weight that the adapter adds to: of its shape and of evenly spread values, rounded to bf16. So the digest of a
run's model, in bf16 or fp32, is that of the checkpoint it was loaded from, in whatever dtype that is stored, and a copy
that was saved anew passes: of the same values, or rounded to bf16.

Guarantees: other weights are told apart, and those that were trained further, unless no value that is taken changes
when rounded; a change of a few values may not be seen. What the adapter does not add to (embeddings, norms, vision)
is not compared.
Costs: some 50 bytes a layer; checking reads some kB of each weight, from a disk that reads ahead at most all of it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from trainer.checkpoint import spread
from trainer.exports import read_json, write_json
from trainer.weights import checkpoint_keys, parameter_name, read_tensor

BASE = "base_weights.json"
"""File beside an adapter; not a field of its configuration, as PEFT warns of fields that it does not know."""

VERSION = 1
"""Of the file; a reader refuses any other."""

_FIELDS: dict[str, Any] = {"base": str | None, "random": bool, "weights": dict}
"""Its fields beside the version, and what each has to be."""


def write_base(folder: Path, weights: Mapping[str, Tensor], *, name: str | None, is_random: bool) -> None:
    """Record what an adapter was trained on.

    Args:
        folder: the adapter's.
        weights: the frozen weight of each layer with an adapter, by the layer's name.
        name: of the base, for people.
        is_random: the weights came from no checkpoint.
    """
    digests = {layer: weight_digest(weight) for layer, weight in weights.items()}
    write_json(folder / BASE, {"version": VERSION, "base": name, "random": is_random, "weights": digests})


def require_base(source: Path, adapter: Path, *, accept_other: bool = False, say: Callable[[str], None]) -> None:
    """Check that a checkpoint holds the weights that an adapter was trained on.

    Args:
        source: folder of the checkpoint.
        adapter: folder of the adapter; `say` is told that nothing can be checked where it has no record.
        accept_other: tell `say` of other weights instead of refusing them.
        say: takes one line.

    Raises ValueError for other weights, for an adapter of random weights, and for a damaged record. A weight that the
    source lacks is not looked at.
    """
    if not (adapter / BASE).is_file():
        say(f"warning: {adapter} has no {BASE}: whether it was trained on the weights of {source} cannot be checked")
        return
    record = _read(adapter / BASE)
    if record["random"]:
        raise ValueError(
            f"{adapter} was trained on random weights (--model random:...), which are in no checkpoint, so "
            f"there is nothing to merge it into. Train one with --model {source} to merge it there"
        )
    other = _differing(source, record["weights"])
    if not other:
        return
    found = (
        f"--source {source} holds other weights than those that {adapter} was trained on, recorded as "
        f"{record['base']} ({len(other)} of the {len(record['weights'])} weights that it adds to differ, "
        f"{other[0]}.weight first)"
    )
    if not accept_other:
        raise ValueError(f"{found}. Pass that checkpoint, or --accept-other-source to merge all the same")
    say(f"warning: {found}; merging all the same, as --accept-other-source asks")


def weight_digest(weight: Tensor) -> str:
    """Hash over a weight's shape and evenly spread values rounded to bf16, wherever it is."""
    digest = xxhash.xxh3_128(str(list(weight.shape)).encode())
    digest.update(spread(weight.detach()).cpu().to(torch.bfloat16).view(torch.uint8).numpy().data)
    return str(digest.hexdigest())


def _differing(source: Path, recorded: Mapping[str, str]) -> list[str]:
    """The layers, in the checkpoint's order, whose weight there is not the recorded one."""
    found = ((parameter_name(key) or "", key, file) for key, file in checkpoint_keys(source).items())
    places = {name.removesuffix(".weight"): (file, key) for name, key, file in found if name.endswith(".weight")}
    return [
        layer
        for layer, place in places.items()
        if layer in recorded and weight_digest(read_tensor(*place)) != recorded[layer]
    ]


def _read(file: Path) -> dict[str, Any]:
    """The record. Raises ValueError where it is damaged or of another version."""
    record = read_json(file)
    if record.get("version") != VERSION:
        raise ValueError(
            f"{file}: version {record.get('version')!r}, this program reads {VERSION}; export the adapter again, or "
            "remove the file to merge it unchecked"
        )
    if wrong := [name for name, kind in _FIELDS.items() if name not in record or not isinstance(record[name], kind)]:
        raise ValueError(
            f"{file}: {', '.join(wrong)} missing or not what they have to be; export the adapter again, or remove the "
            "file to merge it unchecked"
        )
    return record
