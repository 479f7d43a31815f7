"""Expandable segments: PyTorch's allocator by virtual memory management, with sizes that come and go."""
import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ.get("JOB_ALLOC", "expandable_segments:True")

from job import deterministic, digest, say, steps

torch = deterministic()


def main():
    kept, x = [], torch.randn(1 << 20, device="cuda")
    for step in steps(40):
        y = torch.sin(x).repeat(1 + step % 9)
        kept.append(y[:: step + 1].clone())
        if len(kept) > 6:
            kept.pop(step % 5)
        x = x + y[: 1 << 20] * 0.5 + torch.cat(kept).mean()
        if step % 11 == 0:
            torch.cuda.empty_cache()
        if step % 10 == 0:
            say(step, x.sum().item(), digest(x, *kept))


if __name__ == "__main__":
    main()
