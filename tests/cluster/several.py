"""A rank that trains several runs, one after the other: `python -m tests.cluster.several RUN_FOLDER ...`.

Importing TorchRec takes most of a short run's time, so one process imports it for all of them. Tables are
read from checkpoints in small slices, which end within ranks.
"""

import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import torch

from dphybrid.cluster.rank_engine import RankEngine
from dphybrid.cluster.ranks import joined
from dphybrid.config.settings import load_settings
from dphybrid.run.experiment import Experiment
from dphybrid.run.folder import read_run
from dphybrid.run.trainer import train_here
from dphybrid.training import tensor_file
from dphybrid.util.stop import StopRequest

tensor_file._READ_BYTES = 300
try:
    torch.set_num_threads(1)
    with joined(60.0, torch.device("cpu"), Path(sys.argv[1])) as ranks:
        for folder in sys.argv[1:]:
            run = read_run(folder, load_settings())
            experiment = replace(Experiment.of(run), engine=RankEngine(run.config, ranks))
            train_here(experiment, StopRequest())
except BaseException:  # noqa: BLE001 - printed, then this process ends
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)
