"""The trainer: packed Arrow shards in, a trained Qwen out.

    plan      (rows, seed, rows seen) -> which rows a step takes
    batches   rows -> Batch: one packed sequence with its boundaries
    sizes     a `--model` value -> its configuration
    inputs    shards, evaluation shards and configuration fit together; memory: and fit the machine
    model     Batch -> summed loss, through the operations that `kernels` chose once
    kernels   the table of operations; `reference` holds the torch version of each, `fused` those of a GPU
    lora      adapters; `adapters` writes and merges them
    step      forward, backward, one normalisation over all targets, clip; `optimizer` updates; world: the ranks
    weights   Hugging Face folders in and out
    checkpoint  training state: save, find, check, resume
    record    config.json: what was run, and whether it may be resumed; metrics: metrics.jsonl, progress
    train     `python -m trainer.train`: the loop, read top to bottom; `settings`: its command line
    doctor    `python -m trainer.doctor`: this machine's kernels are right
    bench     `python -m trainer.bench`: how fast, and whether curves agree; timeline: where the time went

It imports only `pipeline.shards` from the offline half.
"""
