"""The trainer: packed Arrow shards in, a trained Qwen out.

    plan      (rows, seed, rows seen) -> which rows a step takes
    batches   rows -> Batch: one packed sequence with its boundaries
    sizes     a `--model` value -> its configuration; `hub` finds its files
    inputs    shards, evaluation shards and configuration fit together; memory: and fit the machine
    model     Batch -> summed loss, through the operations that `kernels` chose once
    kernels   the table of operations; `reference` holds the torch version of each, `fused` those of a GPU
    lora      adapters; `adapters` writes and merges them, into the weights that `bases` knows again
    step      forward, backward, one normalisation over all targets, clip; `optimizer` updates; world: the ranks
    weights   Hugging Face folders in and out, `tensors` one at a time; `exports`: what they may replace;
              `outputs`: what a run leaves
    checkpoint  training state: save, find, check, resume; `folders` get their name when they are finished
    record    config.json: what was run, whether it may be resumed, by one process at a time
    metrics   metrics.jsonl; `liveline` shows the step on stderr, `trackers` are TensorBoard and W&B
    flops     operations of a step, and the share of a GPU's speed that they come to
    train     `python -m trainer.train`: the loop, read top to bottom; `settings`: its command line
    doctor    `python -m trainer.doctor`: this machine's kernels are right
    bench     `python -m trainer.bench`: how fast (`ladder` of `rungs`), and whether `curves` agree
              (`distances`)
    timeline  `python -m trainer.timeline`: where the time of a step went, by a trace that `tracing` wrote
              and `events` sorts into steps
    report    `python -m trainer.report`: a run, or several, as a table and one page; without torch. Its `log` reads
              them, `figures` counts, `text` and `page` (`charts`, `traces`, `lanes`) show

Of the offline half it imports the format, the page kit, and what every command line and record needs (`cli`,
`interrupt`, `places`, `provenance`).
"""
