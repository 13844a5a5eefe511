"""Small networks of many kinds, each made by a function without arguments, for the tests of
`check_split`. And helpers: a module made of a function, and replicas that run in threads on the CPU."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from dphybrid.parallel import DataParallel, parallel_apply

MODES = ("inline", "threads")


class Does(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(3, 3), function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Running(DataParallel):
    """A DataParallel whose replicas run inline or in threads, as `mode` says, on the CPU, too."""

    def __init__(self, module: nn.Module, devices: Any = None, mode: Any = "threads", **options: Any) -> None:
        super().__init__(module, devices, **options)
        self.mode = mode

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        return parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)], self.mode)


def mlp_batchnorm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class Recurrent(nn.Module):
    """Last state of a recurrent layer over x (B, T, 6)."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(6, 5, num_layers=2, batch_first=True)  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> Tensor:
        self.layer.flatten_parameters()
        out, _ = self.layer(x)
        return out[:, -1]


def lstm() -> nn.Module:
    return Recurrent(nn.LSTM)


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)
    )


def spectral_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), nn.Linear(4, 3))


class Tied(nn.Module):
    """A table used twice, first for its rows and then as the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.output = nn.Linear(6, 11, bias=False)
        self.output.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.output(F.relu(self.table(x.abs().long() % 11).sum(1)))


SHAPES: dict[Callable[[], nn.Module], tuple[int, ...]] = {
    mlp_batchnorm: (6,),
    lstm: (4, 6),
    transformer: (4, 6),
    cnn: (1, 6, 6),
    spectral_norm: (6,),
    Tied: (6,),
}
