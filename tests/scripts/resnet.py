"""Train a small ResNet on images, as torchvision's reference scripts do."""

import argparse
import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + identity)


class ResNet(nn.Module):
    def __init__(self, planes=(16, 32), num_classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, planes[0], 3, 1, 1, bias=False), nn.BatchNorm2d(planes[0]), nn.ReLU())
        pairs = zip((planes[0], *planes), planes)
        self.layers = nn.Sequential(*(BasicBlock(a, b, 1 if a == b else 2) for a, b in pairs))
        self.fc = nn.Linear(planes[-1], num_classes)

    def forward(self, x):
        return self.fc(self.layers(self.stem(x)).mean((2, 3)))


def train_one_epoch(model, criterion, optimizer, data_loader, device):
    model.train()
    for image, target in data_loader:
        image, target = image.to(device), target.to(device)
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main(device, batch_size=16, images=32):
    dataset = TensorDataset(torch.randn(images, 3, 32, 32), torch.randint(10, (images,)))
    data_loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
    model = ResNet().to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    if __name__ != "__main__":
        batches = itertools.cycle(data_loader)
        return lambda: train_one_epoch(model, criterion, optimizer, [next(batches)], device)
    for epoch in range(2):
        loss = train_one_epoch(model, criterion, optimizer, data_loader, device)
        print(f"epoch {epoch}: loss {loss:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    main(parser.parse_args().device)
