"""A click model whose rank 1 dies once. Variables: MORTAL_STEP, at which step; MORTAL_SIGNAL, by which signal
(SIGSTOP: it hangs); MORTAL_SLOW_S, seconds added to each step."""

import os
import signal
import time
from dataclasses import replace
from typing import Any

from torch import nn

from dphybrid.recipes.context import ModelContext
from dphybrid.recipes.ctr.model import build_ctr


def half_used(context: ModelContext[Any]) -> nn.Module:
    """Return the same model with a table twice as large, whose second half is never looked up."""
    num_ids = [int(number) for number in context.info["num_ids"]]
    num_ids[-1] += sum(num_ids)
    return build_ctr(replace(context, info={**context.info, "num_ids": num_ids}))


def build(context: ModelContext[Any]) -> nn.Module:
    model = build_ctr(context)
    last, steps = int(os.environ.get("MORTAL_STEP", "0")), 0
    slow_s = float(os.environ.get("MORTAL_SLOW_S", "0"))

    def count(module: nn.Module, _: Any) -> None:
        nonlocal steps
        steps += module.training
        time.sleep(slow_s if module.training else 0)
        first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if last and steps == last and os.environ["RANK"] == "1" and first_life:
            os.kill(os.getpid(), getattr(signal, os.environ.get("MORTAL_SIGNAL", "SIGKILL")))

    model.register_forward_pre_hook(count)
    return model
