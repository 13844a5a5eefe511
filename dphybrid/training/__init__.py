"""Training of one run: the loop, its steps, metrics, checkpoints and output.

Where to read: `loop` (epochs and evaluation), `step` (one change of the weights), `engine` (what one process
does differently from several, and the `Session`), `saving` and `checkpoint` (write and load checkpoints),
`tensor_file` (the tensors in them), `optimizers` (dense optimizer, average, schedule), `metrics` and
`label_tasks` (evaluation), `results` (what pages hold), `finite` (NaN and inf), `parts` (of a batch),
`observing`, `clock`, `display` and `split_log` (times and printed lines), `callbacks` (user functions).
"""
