"""A transformer like GPT in training: AdamW, bf16 autocast, gradient clipping, dropout."""
from job import deterministic, digest, say, steps

torch = deterministic()
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(b, t, c)))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.second(x)))))


class Gpt(nn.Module):
    def __init__(self, words=1024, width=512, heads=8, layers=6, length=256):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


model = Gpt().cuda()
best = torch.optim.AdamW(model.parameters(), lr=3e-4)
for step in steps(30):
    tokens = torch.randint(0, 1024, (8, 257), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(found.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    best.step()
    best.zero_grad()
    if step % 10 == 0:
        say(step, loss.item(), digest(*model.parameters(), *[s for p in best.state.values() for s in p.values()]))
