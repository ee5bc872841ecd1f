"""What a run leaves at its end: a Hugging Face folder of all weights, or a PEFT folder of the adapter.

    RUN/export/     after --method full
    RUN/adapter/    after --method lora

Guarantees: rank 0 alone writes, while the others wait; a folder appears under its name when it is whole.
Costs: see ``trainer.weights`` and ``trainer.adapters``.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from trainer import adapters, hub, weights
from trainer.exports import refuse_replacing
from trainer.inputs import Inputs
from trainer.model import Qwen3_5ForCausalLM
from trainer.report.log import CONFIG, METRICS
from trainer.world import on_rank_0, say


def exported(inputs: Inputs) -> Path:
    """The folder that the run leaves."""
    return inputs.out / ("export" if inputs.settings.method == "full" else "adapter")


def require_replaceable(inputs: Inputs) -> None:
    """Raise ValueError where the folder may not be replaced: before the first step, not after the last."""
    what, tensors = ("export", weights.FILES) if inputs.settings.method == "full" else ("adapter", adapters.TENSORS)
    needed = [] if inputs.source is None else [inputs.source]
    refuse_replacing(exported(inputs), what=what, tensors=tensors, needed=needed)


def finish(inputs: Inputs, model: Qwen3_5ForCausalLM, masters: Mapping[Tensor, Tensor]) -> None:
    """Export the model or its adapter and say where everything lies; ``masters`` are the parameters' fp32 ones.

    Raises:
        ValueError: on all ranks, where the folder may not be replaced, or the disk does not take it.
    """
    out = exported(inputs)
    on_rank_0(inputs.world, lambda: _export(inputs, model, masters, out))
    say(
        inputs.world,
        f"done\n  metrics      {inputs.out / METRICS}\n  checkpoints  {inputs.out / 'checkpoints'}\n"
        f"  record       {inputs.out / CONFIG}\n  {out.name:<11}  {out}",
    )
    if inputs.settings.method == "lora" and inputs.source is not None:
        places = {"--adapter": out, "--source": inputs.source, "--out": inputs.out / "export"}
        options = shlex.join(str(word) for option in places.items() for word in option)
        merge = f"python -m trainer.adapters merge {options}"
        say(inputs.world, f"The adapter merged into the original weights:\n  {merge}")


def _export(inputs: Inputs, model: Qwen3_5ForCausalLM, masters: Mapping[Tensor, Tensor], out: Path) -> None:
    """Write a Hugging Face folder of all weights, or a PEFT folder of the adapter."""
    settings, tokenizer = inputs.settings, inputs.dataset.path / "tokenizer"
    eos_token_ids = inputs.dataset.manifest.recipe["tokenizer"]["eos_token_ids"]
    if settings.method == "full":
        weights.export(
            out, model=model, source=inputs.source, masters=masters, tokenizer_dir=tokenizer,
            eos_token_ids=eos_token_ids,
        )  # fmt: skip
    else:
        base, revision = hub.parse(str(settings.model)) if inputs.source else (None, None)
        adapters.export(
            out, model=model, source=inputs.source, rank=settings.lora_rank, alpha=settings.lora_alpha,
            tokenizer_dir=tokenizer, eos_token_ids=eos_token_ids, base=base, revision=revision,
        )  # fmt: skip
