"""Scaled dot-product attention by each of its back ends, forward and backward."""
from job import deterministic, digest, say, steps

torch = deterministic()
torch.use_deterministic_algorithms(True, warn_only=True)
from torch.nn.attention import SDPBackend, sdpa_kernel

backends = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
state = torch.randn(2, 8, 256, 64, device="cuda", dtype=torch.bfloat16)
for step in steps(24):
    backend = backends[step % 4]
    q, k, v = ((state * f).clone().requires_grad_(backend is not SDPBackend.CUDNN_ATTENTION) for f in (1, 0.5, 2))
    with sdpa_kernel(backend):
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    if q.requires_grad and backend is not SDPBackend.EFFICIENT_ATTENTION:
        y.sum().backward()
        y = y + q.grad * 0.01
    state = torch.tanh(y.detach()) + torch.randn_like(y)
    if step % 4 == 0:
        say(step, digest(state))
