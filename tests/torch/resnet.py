"""ResNet-152 training: AMP, GradScaler, SGD with momentum; a DataLoader with pinned memory whose workers are forked."""
import os

from job import deterministic, digest, say, steps

torch = deterministic()
import torchvision

start = os.environ.get("JOB_START", "fork")


class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return 100000

    def __getitem__(self, index):
        random = torch.Generator().manual_seed(index)
        return torch.rand(3, 64, 64, generator=random), index * 7919 % 10


def main():
    model = torchvision.models.resnet152(num_classes=10).cuda()
    best = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    loader = iter(torch.utils.data.DataLoader(
        Pictures(), batch_size=16, num_workers=2, pin_memory=True, multiprocessing_context=start))
    for step in steps(16):
        pictures, labels = next(loader)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(
                model(pictures.cuda(non_blocking=True)), labels.cuda(non_blocking=True))
        scaler.scale(loss).backward()
        scaler.step(best)
        scaler.update()
        best.zero_grad()
        if step % 4 == 0:
            say(step, loss.item(), digest(*model.parameters()))


if __name__ == "__main__":
    main()
