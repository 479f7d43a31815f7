"""FFT, SVD, eigenvalues, solving, sparse products, products of 8-bit floats: cuFFT, cuSOLVER, cuSPARSE, cuBLASLt."""
from job import deterministic, digest, say, steps

torch = deterministic()
torch.use_deterministic_algorithms(True, warn_only=True)
x = torch.randn(128, 128, device="cuda")
eye = torch.eye(128, device="cuda")
for step in steps(12):
    f = torch.fft.ifft2(torch.fft.fft2(x) * 0.99).real
    u, s, v = torch.linalg.svd(f)
    e, w = torch.linalg.eigh(f @ f.T + eye)
    z = torch.linalg.solve(f @ f.T + 10 * eye, x)
    # cuSPARSE adds in no fixed order, so what it adds is whole numbers.
    sparse = torch.where(x.abs() > 1.5, (x * 4).round(), 0).to_sparse_csr()
    p = sparse @ (x * 8).round() / 64 + (u * s) @ v
    a, b = (t.clamp(-4, 4).to(torch.float8_e4m3fn) for t in (x, w.T.contiguous()))
    one = torch.ones((), device="cuda")
    q = torch._scaled_mm(a, b.T.contiguous().T, one, one, out_dtype=torch.bfloat16).float()
    x = torch.tanh(p / 16 + z + q / 32 + e / 128) + torch.randn_like(x)
    if step % 3 == 0:
        say(step, *map(digest, (f, u, e, z, p, q, x)))
