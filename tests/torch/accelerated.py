"""Accelerate: a recurrent network of cuDNN with mixed precision, accumulated gradients and a schedule."""
from job import count, deterministic, digest, hold, say

torch = deterministic()
from accelerate import Accelerator


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(256, 128)
        self.past = torch.nn.LSTM(128, 256, num_layers=2, batch_first=True, dropout=0.1)
        self.out = torch.nn.Linear(256, 256)

    def forward(self, tokens):
        return self.out(self.past(self.words(tokens))[0])


tokens = torch.randint(0, 256, (2048, 65), generator=torch.Generator().manual_seed(3))
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
model = Network()
best = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, best, loader, schedule = accelerator.prepare(
    model, best, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=32, shuffle=True),
    torch.optim.lr_scheduler.CosineAnnealingLR(best, 40))
step = 0
while step < count(40):
    for (batch,) in loader:
        with accelerator.accumulate(model):
            found = model(batch[:, :-1])
            loss = torch.nn.functional.cross_entropy(found.flatten(0, 1).float(), batch[:, 1:].flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            best.step()
            schedule.step()
            best.zero_grad()
        step += 1
        if step % 10 == 0:
            say(step, loss.item(), digest(*model.parameters()))
        hold(step)
        if step == count(40):
            break
