"""e3nn: tensor products and gates of features that turn with space, which TorchScript compiles."""
from job import deterministic, digest, say, steps

torch = deterministic()
from e3nn import o3
from e3nn.nn import FullyConnectedNet

inner = o3.Irreps("16x0e + 8x1o + 4x2e")
around = o3.Irreps.spherical_harmonics(2)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.product = o3.FullyConnectedTensorProduct(inner, around, inner, shared_weights=False)
        self.weights = FullyConnectedNet([8, 32, self.product.weight_numel], torch.nn.functional.silu)
        self.mix = o3.Linear(inner, inner)

    def forward(self, x, length, direction, one, other):
        message = self.product(x[one], direction, self.weights(length))
        return x + self.mix(torch.zeros_like(x).index_add(0, other, message)) / 4


layers = torch.nn.ModuleList(Layer() for _ in range(2)).cuda()
best = torch.optim.Adam(layers.parameters(), lr=1e-3)
places, x = torch.randn(128, 3, device="cuda"), inner.randn(128, -1).cuda()
for step in steps(30):
    one, other = torch.randint(0, 128, (2, 1024), device="cuda")
    along = places[one] - places[other]
    direction = o3.spherical_harmonics(around, along, normalize=True, normalization="component")
    length = torch.exp(-(along.norm(dim=1, keepdim=True) - torch.linspace(0, 4, 8, device="cuda")) ** 2)
    y = x
    for layer in layers:
        y = layer(y, length, direction, one, other)
    loss = (y[:, :16].sum(1) - places.norm(dim=1)).square().mean()
    loss.backward()
    best.step()
    best.zero_grad()
    if step % 10 == 0:
        say(step, loss.item(), digest(*layers.parameters()))
