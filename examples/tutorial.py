"""The data-parallel tutorials in one file: a split batch, parallel blocks, a table in host memory, a GAN.

    python examples/tutorial.py                              # the GPUs of this machine, else its CPU
    DPHYBRID_DEVICES='cpu*3' python examples/tutorial.py     # three virtual devices on a laptop

docs/tutorial.md explains what it prints. Letters: B samples, F ids of a sample, D width of a row, Z noise.
"""

# %%
# [start:toy]
# One line changed: where a script says model = nn.DataParallel(model), import DataParallel from here.
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

from dphybrid.embedding import HostEmbedding, RowPipeline, clip_grad_norm_, dense_parameters, row_optimizer
from dphybrid.parallel import DataParallel, device_count


class Toy(nn.Module):
    """Linear(5, 2) that prints the share of the batch which it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        print("\tIn Model: input size", x.size(), "output size", y.size())
        return y


def split_a_batch() -> None:
    """100 rows in batches of 30: the last batch has 10 rows, and eight devices split it 2, 2, 2, 2, 2."""
    print(f"Let's use {device_count()} devices!")
    model = DataParallel(Toy())
    for x in torch.randn(100, 5).split(30):
        y = model(x)
        print("Outside: input size", x.size(), "output_size", y.size())


# [end:toy]


# %%
# [start:blocks]
# Only some blocks parallel: the others run once, on the first device.
class Blocks(nn.Module):
    """Three linear layers of which the middle one is split."""

    def __init__(self) -> None:
        super().__init__()
        self.block1 = nn.Linear(10, 20)
        self.block2 = DataParallel(nn.Linear(20, 20))
        self.block3 = nn.Linear(20, 20)
        self.to(self.block2.devices.home)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block3(self.block2(self.block1(x.to(self.block2.devices.home))))
        return y


# [end:blocks]


# %%
# [start:table]
# A table in host memory: its rows travel to the replica that needs them, its gradients come back.
class Clicks(nn.Module):
    """A small network over the concatenated rows of two ids."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.table = HostEmbedding(num_rows, 16)  # stays in host memory, whatever .to() does
        self.net = DataParallel(nn.Sequential(nn.Flatten(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)))

    def table_ids(self, ids_BF: Tensor) -> dict[str, Tensor]:
        """The ids that forward will look up: RowPipeline fetches their rows one batch ahead."""
        return {"table": ids_BF}

    def forward(self, ids_BF: Tensor) -> Tensor:
        logits_B: Tensor = self.net(self.net.rows(self.table, ids_BF)).squeeze(1)
        return logits_B


def train_a_table(num_rows: int = 1_000_000, steps: int = 60) -> float:
    """Train on clicks of even first ids; return the last loss."""
    model = Clicks(num_rows)
    dense = torch.optim.Adam(dense_parameters(model), lr=0.01)
    rows = row_optimizer("adagrad", model, lr=0.1)  # updates only the rows of the batch
    with RowPipeline(model) as pipeline:
        for ids_BF in pipeline.prefetch(torch.randint(0, 50, (steps, 62, 2)), model.table_ids):
            dense.zero_grad()
            rows.zero_grad()
            logits_B = model(ids_BF)
            loss = binary_cross_entropy_with_logits(logits_B, (ids_BF[:, 0] % 2 == 0).to(logits_B))
            loss.backward()
            clip_grad_norm_(model.parameters(), max_norm=1.0)  # one norm for blocks and rows
            dense.step()
            rows.step()
    assert model.net.last_split is not None
    print(f"loss {loss.item():.3f}; the last batch was split:", *model.net.last_split.lines(), sep="\n")
    return loss.item()


# [end:table]


# %%
# [start:gan]
# A GAN: two regions, two optimizers.
def train_a_gan(steps: int = 400) -> tuple[float, float]:
    """Learn a normal distribution around 3 with spread 0.5; return mean and spread of what is generated."""
    generator = DataParallel(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1)))
    critic = DataParallel(nn.Sequential(nn.Linear(1, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
    make = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
    judge = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.99))
    for _ in range(steps):
        fake_B1, real_B1 = generator(torch.randn(128, 4)), 3 + 0.5 * torch.randn(128, 1)
        judge.zero_grad()
        (softplus(-critic(real_B1)).mean() + softplus(critic(fake_B1.detach())).mean()).backward()
        judge.step()
        make.zero_grad()
        softplus(-critic(fake_B1)).mean().backward()
        make.step()
    with torch.no_grad():
        made_B1 = generator(torch.randn(2000, 4))
    print(f"generated: mean {made_B1.mean():.2f}, spread {made_B1.std():.2f}; real: 3.00, 0.50")
    return made_B1.mean().item(), made_B1.std().item()


# [end:gan]


# %%
if __name__ == "__main__":
    torch.manual_seed(0)
    split_a_batch()
    print("blocks:", Blocks()(torch.randn(30, 10)).shape)
    train_a_table()
    train_a_gan()
