"""Configurations with sizes that cannot be computed are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_config
from trainer.sizes import COUNTS, resolve_config


def resolve(tmp_path: Path, content: dict[str, Any]) -> Any:
    file = tmp_path / "c.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    return resolve_config(f"random:{file}")


@pytest.mark.filterwarnings("ignore")  # transformers has its own say
@pytest.mark.parametrize("size", [0, -2, 2.5, "4", None, True])
@pytest.mark.parametrize("name", COUNTS)
def test_a_size_is_a_whole_number_of_at_least_1(tmp_path: Path, name: str, size: Any) -> None:
    config = {**tiny_config().to_dict(), name: size}
    if name == "num_hidden_layers":
        del config["layer_types"]
    with pytest.raises(ValueError, match=name):
        resolve(tmp_path, config)


@pytest.mark.parametrize("content", [None, "x", [], 5])
def test_a_text_config_is_an_object(tmp_path: Path, content: Any) -> None:
    with pytest.raises(ValueError, match="has a text_config that is no object"):
        resolve(tmp_path, {"model_type": "qwen3_5", "text_config": content})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rope_theta", None), ("rope_theta", 0), ("rope_theta", -1.0), ("rope_theta", "x"),
        ("rope_theta", float("nan")),
        ("partial_rotary_factor", None), ("partial_rotary_factor", 0), ("partial_rotary_factor", 2.0),
    ],
)  # fmt: skip
def test_rotary_parameters_are_numbers_that_turn_something(tmp_path: Path, name: str, value: Any) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, name: value}
    with pytest.raises(ValueError, match=name):
        resolve(tmp_path, {**tiny_config().to_dict(), "rope_parameters": rope})
