"""A Triton kernel of one's own, also with an autotuner that tries configurations."""
from job import deterministic, digest, say, steps

torch = deterministic()
import triton
import triton.language as tl


@triton.jit
def scale(x, y, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    tl.store(y + at, tl.sin(value) * factor + value, mask=at < n)


@triton.autotune(configs=[triton.Config({"M": m, "N": 64, "K": 32}, num_warps=w) for m in (32, 64, 128) for w in (2, 4)],
                 key=["size"])
@triton.jit
def product(a, b, c, size, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    row, col = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    sum = tl.zeros((M, N), tl.float32)
    for k in range(0, size, K):
        ks = k + tl.arange(0, K)
        sum += tl.dot(tl.load(a + row[:, None] * size + ks[None]), tl.load(b + ks[:, None] * size + col[None]))
    tl.store(c + row[:, None] * size + col[None], sum.to(tl.float16))


x = torch.randn(100003, device="cuda")
# Small whole numbers: sums are exact, whatever the autotuner chooses.
a = torch.randint(-2, 3, (512, 512), device="cuda").half()
for step in steps(30):
    y = torch.empty_like(x)
    scale[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), 0.25, BLOCK=1024)
    c = torch.empty_like(a)
    product[lambda m: (512 // m["M"], 512 // m["N"])](a, a, c, 512)
    x, a = y, torch.remainder(c.roll(step, 0), 5) - 2
    if step % 10 == 0:
        say(step, digest(x, a))
