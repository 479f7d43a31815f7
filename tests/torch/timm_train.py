"""timm: a ConvNeXt in channels-last layout with stochastic depth, timm's optimiser and schedule, a moving average of its weights."""
from job import deterministic, digest, say, steps

torch = deterministic()
import timm
import timm.optim
import timm.scheduler
import timm.utils

model = timm.create_model("convnext_atto", pretrained=False, num_classes=10, drop_path_rate=0.1)
model = model.to("cuda", memory_format=torch.channels_last)
mean = timm.utils.ModelEmaV3(model, decay=0.9)
best = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
schedule = timm.scheduler.CosineLRScheduler(best, t_initial=30, warmup_t=5, warmup_lr_init=1e-5)
for step in steps(24):
    pictures = torch.randn(16, 3, 96, 96, device="cuda").contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (16,), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(pictures), labels, label_smoothing=0.1)
    loss.backward()
    best.step()
    best.zero_grad()
    schedule.step(step)
    mean.update(model)
    if step % 6 == 0:
        say(step, loss.item(), digest(*model.parameters(), *mean.module.parameters()))
