"""Several processes, perhaps on several machines, that train one model: the table in rows over all of them,
on TorchRec.

Nothing here imports TorchRec before a rank begins to work: a run of one process never does.
"""
