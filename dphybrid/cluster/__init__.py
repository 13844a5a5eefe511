"""Training of one model by several processes (ranks), on one or more machines. The rows of its table are
spread over all ranks, with TorchRec.

TorchRec is imported only in a rank that trains; a run of one process never imports it.
"""
