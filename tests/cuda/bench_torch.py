#!/usr/bin/env python3
"""Training steps of ResNet-50 by PyTorch on this GPU: AMP in FP16, channels_last.

    bench_torch.py BATCH_SIZE [STEPS]

Prints one JSON object, {"images_per_second": ..., ...}. The batch lies on the GPU already. Exit
status 3: there is no torch, or none that sees a GPU.
"""
import json
import sys
import time

try:
    import torch
    from torch import nn
except ImportError:
    sys.exit(3)


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride), 1x1 to four times the channels; torchvision's ResNet-50 block."""

    def __init__(self, channels_in, channels, stride):
        super().__init__()
        out = 4 * channels
        self.branch = nn.Sequential(
            nn.Conv2d(channels_in, channels, 1, bias=False), nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, out, 1, bias=False), nn.BatchNorm2d(out))
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels_in, out, 1, stride, bias=False),
                                          nn.BatchNorm2d(out))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.branch(x) + self.shortcut(x))


def resnet50():
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
              nn.MaxPool2d(3, 2, 1)]
    channels_in = 64
    for channels, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(blocks):
            layers.append(Bottleneck(channels_in, channels, stride if i == 0 else 1))
            channels_in = 4 * channels
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, 1000)]
    return nn.Sequential(*layers)


def measure(batch_size, steps):
    torch.backends.cudnn.benchmark = True
    device = torch.device('cuda')
    model = resnet50().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    scaler = torch.cuda.amp.GradScaler()
    loss_of = nn.CrossEntropyLoss()
    images = torch.randn(batch_size, 3, 224, 224, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.arange(batch_size, device=device) % 1000

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast('cuda', dtype=torch.float16):
            loss = loss_of(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(5):  # cuDNN tries its algorithms in the first
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return batch_size * steps / (time.perf_counter() - start)


def main():
    if not torch.cuda.is_available():
        sys.exit(3)
    batch_size = int(sys.argv[1])
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 30
    print(json.dumps({'images_per_second': measure(batch_size, steps), 'batch_size': batch_size,
                      'torch': torch.__version__, 'cudnn': torch.backends.cudnn.version()}))


if __name__ == '__main__':
    main()
