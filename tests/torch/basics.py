"""Tensors and nothing more: elementwise, reductions, products, indexing, sorting, random numbers."""
from job import deterministic, digest, say, steps

torch = deterministic()
x = torch.randn(512, 512, device="cuda")
for step in steps(40):
    x = torch.tanh(x @ x.T / 64 + torch.randn_like(x))
    x[:: step % 7 + 1] *= 0.5
    order = torch.sort(x.flatten()).indices[: 512 * 8].view(8, 512)
    x = x + x.flatten()[order].mean(0) + x.cumsum(0) / 512
    if step % 10 == 0:
        say(step, x.sum().item(), digest(x))
