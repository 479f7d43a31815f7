"""One workload of the benchmark `overhead`: a process that does as many steps as it is told, and says how long each took.

    overhead_work.py NAME      reads lines "N" and answers each with a line of JSON: nanoseconds of each timed thing

A timed thing is a step with the GPU idle at its end, or, where the workload is about how fast work is enqueued, an equal
share of a block of steps with the GPU idle at the block's end.
"""

import json
import sys
import time

start = time.monotonic_ns()
import torch  # noqa: E402


def resnet(batch):
    import torchvision
    model = torchvision.models.resnet152().cuda().to(memory_format=torch.channels_last)
    best = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(batch, 3, 224, 224, device="cuda").contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 1000, (batch,), device="cuda")

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        best.step()
        best.zero_grad()
    return step


def gpt(width, layers, batch, length):
    nn = torch.nn
    layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
    model = nn.Sequential(nn.Embedding(32000, width), nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
                          nn.Linear(width, 32000, bias=False)).cuda()
    best = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 32000, (batch, length), device="cuda")

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        best.step()
        best.zero_grad()
    return step


def llama(hidden, layers, heads, inner, graph=False):
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
    config = LlamaConfig(vocab_size=32000, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
                         num_attention_heads=heads, max_position_embeddings=2048)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    prompt = torch.randint(0, 32000, (1, 32), device="cuda")
    state = {}

    @torch.no_grad()
    def begin():
        state["cache"] = DynamicCache(config=config)
        state["token"] = model(prompt, past_key_values=state["cache"], use_cache=True).logits[:, -1].argmax(-1, keepdim=True)

    @torch.no_grad()
    def step():
        if not state or state["cache"].get_seq_length() > 512:
            begin()
        out = model(state["token"], past_key_values=state["cache"], use_cache=True)
        state["token"] = out.logits[:, -1].argmax(-1, keepdim=True)
    if not graph:
        return step
    cache = StaticCache(config=config, max_cache_len=512)
    place, token = torch.full((1,), 40, device="cuda"), prompt[:, :1].clone()

    @torch.no_grad()
    def once():
        out = model(token, past_key_values=cache, use_cache=True, position_ids=place[None])
        token.copy_(out.logits[:, -1].argmax(-1, keepdim=True))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            once()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        once()
    state["steps"] = 0

    def replay():
        # The cache counts on the device, step by step; it must not run full.
        state["steps"] += 1
        if state["steps"] % 256 == 0:
            for layer in cache.layers:
                for value in vars(layer).values():
                    if isinstance(value, torch.Tensor) and not value.is_floating_point():
                        value.zero_()
        captured.replay()
    return replay


def experts(hidden, inner, layers, count, chosen):
    """Decodes with a mixture of experts, each a module of its own; a token goes through a few of each layer."""
    nn, kinds = torch.nn, {"device": "cuda", "dtype": torch.bfloat16}
    linear = lambda a, b: nn.Linear(a, b, bias=False, **kinds)
    expert = lambda: nn.ModuleList([linear(hidden, inner), linear(hidden, inner), linear(inner, hidden)])
    layer = lambda: nn.ModuleDict({"norm": nn.RMSNorm(hidden, **kinds), "mix": linear(hidden, hidden), "router": linear(hidden, count),
                                   "experts": nn.ModuleList(expert() for _ in range(count))})
    embedding, out = nn.Embedding(32000, hidden, **kinds), linear(hidden, 32000)
    model = [layer() for _ in range(layers)]
    state = {"token": torch.zeros(1, dtype=torch.int64, device="cuda")}

    @torch.no_grad()
    def step():
        x = embedding(state["token"])
        for layer in model:
            y = layer["norm"](x)
            y = y + layer["mix"](y)
            weights, best = layer["router"](y).softmax(-1).topk(chosen)
            for weight, number in zip(weights[0], best[0].tolist()):
                gate, up, down = layer["experts"][number]
                x = x + weight * down(nn.functional.silu(gate(y)) * up(y))
        state["token"] = (out(x).argmax(-1) + 7919 * state["token"] + 1) % 32000
    return step


def small():
    x, y = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")

    def step():
        z = x
        for _ in range(100):
            z = z * 0.5 + y
    return step


def copies(pinned):
    host = torch.randn(1 << 22)
    host = host.pin_memory() if pinned else host
    back, x = torch.empty_like(host, pin_memory=pinned), torch.empty(1 << 22, device="cuda")

    def step():
        x.copy_(host, non_blocking=pinned)
        y = x * 2
        back.copy_(y, non_blocking=pinned)
    return step


def item():
    x = torch.ones(16, device="cuda")

    def step():
        for _ in range(20):
            (x + 1).sum().item()
    return step


# What makes the step, and whether it is about enqueueing.
WORKLOADS = {
    "resnet152 training, batch 32": (lambda: resnet(32), True),
    "resnet152 training, batch 256": (lambda: resnet(256), True),
    "GPT training, 12 layers of 768": (lambda: gpt(768, 12, 8, 512), True),
    "GPT training, 24 layers of 2048": (lambda: gpt(2048, 24, 8, 1024), True),
    "Llama 1B decode, eager": (lambda: llama(2048, 22, 32, 5632), True),
    "Llama 1B decode, CUDA graph": (lambda: llama(2048, 22, 32, 5632, True), True),
    "Llama 13B decode, eager": (lambda: llama(5120, 40, 40, 13824), True),
    "100 x 2 small eager operations": (small, True),
    "16 MiB pageable to and fro": (lambda: copies(False), False),
    "16 MiB pinned to and fro": (lambda: copies(True), False),
    "20 x 2 operations and .item()": (item, False),
}


def main():
    name = sys.argv[1]
    if name == "start":
        torch.ones(1, device="cuda").add_(1).item()
        print(json.dumps([time.monotonic_ns() - start]), flush=True)
        return
    make, block = WORKLOADS[name]
    step = make()
    torch.cuda.synchronize()
    print("ready", flush=True)
    for line in sys.stdin:
        count, times = int(line), []
        torch.cuda.synchronize()
        if block:
            begin = time.perf_counter_ns()
            for _ in range(count):
                step()
            torch.cuda.synchronize()
            times = [(time.perf_counter_ns() - begin) / count]
        else:
            for _ in range(count):
                begin = time.perf_counter_ns()
                step()
                torch.cuda.synchronize()
                times.append(time.perf_counter_ns() - begin)
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
