"""Lightning's Trainer: 16-bit mixed precision, clipped gradients, a schedule of each step."""
from job import count, deterministic, digest, hold, say

torch = deterministic()
import lightning


class Network(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(32, 64, 3, padding=1), torch.nn.GroupNorm(8, 64), torch.nn.SiLU(), torch.nn.Flatten(),
            torch.nn.Linear(64 * 16 * 16, 10))

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        best = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(best, 1e-3, total_steps=count(40) + 1)
        return {"optimizer": best, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, outputs, batch, index):
        step = index + 1
        if step % 10 == 0:
            say(step, outputs["loss"].item(), digest(*self.parameters()))
        hold(step)


pictures = torch.rand(count(40) * 32, 3, 32, 32)
labels = (pictures.mean((1, 2, 3)) * 1000).long() % 10
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(pictures, labels), batch_size=32, pin_memory=True)
trainer = lightning.Trainer(
    accelerator="gpu", devices=1, max_epochs=1, precision="16-mixed", gradient_clip_val=1.0, deterministic=True, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
model = Network()
trainer.fit(model, loader)
say("fitted", digest(*model.parameters()))
