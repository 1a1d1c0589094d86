"""Whole vision models with random weights: one export, three sizes in the engine, f32 error at most 1e-4."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.engine_check import check

BATCH = {"input_0": {0: "B"}}
IMAGES = {"input_0": {0: "B", 2: "H", 3: "W"}}


def _conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _conv(inputs, width, 1), nn.ReLU(), _conv(width, width, 3, stride), nn.ReLU(), _conv(width, 4 * width, 1)
        )
        same = inputs == 4 * width and stride == 1
        self.shortcut = nn.Identity() if same else _conv(inputs, 4 * width, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet() -> nn.Module:
    stem = [_conv(3, 8, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks = [Bottleneck(8, 4, 1), Bottleneck(16, 4, 1), Bottleneck(16, 8, 2), Bottleneck(32, 16, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, hidden: int, outputs: int, stride: int) -> None:
        super().__init__()
        spatial = [_conv(hidden, hidden, 5, stride, groups=hidden), SqueezeExcite(hidden), nn.Hardswish()]
        self.body = nn.Sequential(_conv(inputs, hidden, 1), nn.Hardswish(), *spatial, _conv(hidden, outputs, 1))
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.residual else self.body(x)


def mobilenet_v3() -> nn.Module:
    blocks = [InvertedResidual(8, 16, 8, 1), InvertedResidual(8, 24, 12, 2), InvertedResidual(12, 36, 12, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 16), nn.Hardswish(), nn.Dropout(), nn.Linear(16, 5)]
    return nn.Sequential(_conv(3, 8, 3, 2), nn.Hardswish(), *blocks, *head)


class UNet(nn.Module):
    """Skips are met by interpolation to their size, so that any image fits."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._block(3, 8), self._block(8, 16), self._block(16, 32)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.merge = nn.ModuleList([self._block(32, 16), self._block(16, 8)])
        self.head = nn.Conv2d(8, 2, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for index, block in enumerate(self.down):
            x = block(x)
            if index < 2:
                skips.append(x)
                x = F.max_pool2d(x, 2)
        for up, merge in zip(self.up, self.merge, strict=True):
            skip = skips.pop()
            x = F.interpolate(up(x), size=skip.shape[2:], mode="bilinear", align_corners=False)
            x = merge(torch.cat([skip, x], dim=1))
        return self.head(x)


class YoloHead(nn.Module):
    """Two scales, a spatial pyramid of max pools, anchors from a grid of the image's own size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv(3, 8, 3, 2), nn.SiLU(), _conv(8, 16, 3, 2), nn.SiLU())
        self.deep = nn.Sequential(_conv(16, 16, 3, 2), nn.SiLU())
        self.fuse, self.small = _conv(64, 16, 1), nn.Conv2d(32, 3 * 7, 1)
        self.large = nn.Conv2d(16, 3 * 7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shallow = self.stem(x)
        pools = [self.deep(shallow)]
        for _ in range(3):
            pools.append(F.max_pool2d(pools[-1], 5, 1, 2))
        deep = self.fuse(torch.cat(pools, 1))
        wide = F.interpolate(deep, scale_factor=2, mode="nearest")[:, :, : shallow.shape[2], : shallow.shape[3]]
        maps = [(self.small(torch.cat([shallow, wide], 1)), 4), (self.large(deep), 8)]
        return torch.cat([self._boxes(features, stride) for features, stride in maps], 1)

    @staticmethod
    def _boxes(features: torch.Tensor, stride: int) -> torch.Tensor:
        batch, _, height, width = features.shape
        values = features.view(batch, 3, 7, height, width).permute(0, 1, 3, 4, 2).sigmoid()
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        grid = torch.stack([columns, rows], -1).to(values.dtype)
        centres = (values[..., :2] * 2 - 0.5 + grid) * stride
        sizes = (values[..., 2:4] * 2) ** 2 * stride
        return torch.cat([centres, sizes, values[..., 4:]], -1).reshape(batch, -1, 7)


def convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(depths=[1, 1, 2, 1], hidden_sizes=[8, 16, 24, 32], num_labels=4)
    return Logits(ConvNextForImageClassification(config))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=32, patch_size=8
    )
    return Logits(ViTForImageClassification(config))


def swin() -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 4], window_size=4)
    return Logits(SwinForImageClassification(config))


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values=pixel_values).logits


class Detr(nn.Module):
    """A convolutional backbone, sine positions of the image's own size, a transformer, object queries."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(_conv(3, 16, 3, 4), nn.ReLU(), _conv(16, 32, 3, 2), nn.ReLU())
        self.encoder = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(32, 4, 48, batch_first=True)
        self.queries = nn.Parameter(torch.randn(5, 32))
        self.classes, self.boxes = nn.Linear(32, 4), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.backbone(x)
        memory = self.encoder(features.flatten(2).transpose(1, 2) + self._positions(features))
        decoded = self.decoder(self.queries.expand(x.shape[0], -1, -1), memory)
        return self.classes(decoded), self.boxes(decoded).sigmoid()

    @staticmethod
    def _positions(features: torch.Tensor) -> torch.Tensor:
        height, width = features.shape[2:]
        frequencies = 1.0 / 100 ** (torch.arange(8) / 8)
        rows = (torch.arange(height) + 1)[:, None] * frequencies
        columns = (torch.arange(width) + 1)[:, None] * frequencies
        vertical = torch.cat([rows.sin(), rows.cos()], -1)[:, None].expand(height, width, 16)
        horizontal = torch.cat([columns.sin(), columns.cos()], -1)[None].expand(height, width, 16)
        return torch.cat([vertical, horizontal], -1).reshape(height * width, 32)


ANY_IMAGE = ((2, 3, 48, 64), (3, 3, 64, 40), (2, 3, 72, 56))
ANY_BATCH = ((2, 3, 32, 32), (1, 3, 32, 32), (5, 3, 32, 32))

MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, dict[int, str]], Sequence[tuple[int, ...]]]] = {
    "resnet": (resnet, IMAGES, ANY_IMAGE),
    "mobilenet_v3": (mobilenet_v3, IMAGES, ANY_IMAGE),
    "convnext": (convnext, IMAGES, ((2, 3, 64, 96), (3, 3, 96, 64), (2, 3, 128, 72))),
    "unet": (UNet, IMAGES, ((2, 3, 30, 41), (3, 3, 64, 40), (2, 3, 19, 23))),
    "yolo": (YoloHead, IMAGES, ANY_IMAGE),
    "detr": (Detr, IMAGES, ANY_IMAGE),
    "vit": (vit, BATCH, ANY_BATCH),
    "swin": (swin, BATCH, ANY_BATCH),
}


@pytest.mark.parametrize("name", MODELS)
def test_model_at_three_sizes(name: str) -> None:
    torch.manual_seed(0)
    build, axes, shapes = MODELS[name]
    model = build().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.2, 0.2), nn.init.uniform_(module.running_var, 0.5, 1.5)
    sample, *others = ((torch.randn(shape),) for shape in shapes)
    check(model, sample, *others, dynamic_axes=axes, rtol=0, atol=1e-4)
