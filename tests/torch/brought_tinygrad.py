"""tinygrad: a network of convolutions trained under its JIT, which batches kernels into CUDA graphs and changes their parameters."""
import os

from job import digest, libraries, say, steps

os.environ.update({"DEV": "CUDA", "CACHELEVEL": "0", "PARALLEL": "0"})
os.environ.setdefault("NVRTC_PATH", libraries("nvrtc-builtins", "nvrtc")[1])
from tinygrad import Device, Tensor, TinyJit, nn
from tinygrad.helpers import Context

if Device.DEFAULT != "CUDA":
    raise SystemExit("tinygrad has found no GPU")
Tensor.manual_seed(4)


class Network:
    def __init__(self):
        self.one, self.two = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3)
        self.norm, self.out = nn.BatchNorm(32), nn.Linear(32 * 6 * 6, 10)

    def __call__(self, x):
        x = self.one(x).relu().max_pool2d()
        return self.out(self.norm(self.two(x)).relu().max_pool2d().flatten(1))


model = Network()
best = nn.optim.AdamW(nn.state.get_parameters(model), lr=1e-3)


@TinyJit
def train(x, y):
    best.zero_grad()
    loss = model(x).sparse_categorical_crossentropy(y).backward()
    best.step()
    return loss.realize()


with Context(TRAINING=1):
    for step in steps(40):
        x, y = Tensor.randn(32, 3, 32, 32).realize(), Tensor.randint(32, high=10).realize()
        loss = train(x, y)
        if step % 10 == 0:
            say(step, loss.item(), digest(*(p.numpy() for p in nn.state.get_parameters(model))))
