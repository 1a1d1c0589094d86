"""Fourier transforms, at sizes other than the traced one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.engine_check import check

Function = Callable[[torch.Tensor], torch.Tensor]
AXES = {"input_0": {1: "T"}}

DYNAMIC: dict[str, Function] = {
    "fft": lambda x: torch.fft.fft(x, dim=1),
    "fft_ortho": lambda x: torch.fft.fft(x, dim=1, norm="ortho"),
    "ifft": lambda x: torch.fft.ifft(torch.fft.fft(x, dim=1), dim=1),
    "ifft_forward": lambda x: torch.fft.ifft(x, dim=1, norm="forward"),
    "rfft": lambda x: torch.fft.rfft(x, dim=1),
    "rfft2": lambda x: torch.fft.rfft2(x),
    "fftn": lambda x: torch.fft.fftn(x, dim=(1, 2), norm="ortho"),
    "ihfft": lambda x: torch.fft.ihfft(x, dim=1),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_at_other_lengths(name: str) -> None:
    torch.manual_seed(0)

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(DYNAMIC[name](x).resolve_conj())

    check(model, (torch.randn(2, 10, 4),), (torch.randn(2, 7, 4),), dynamic_axes=AXES)


STATIC: dict[str, Function] = {
    "irfft_even": lambda x: torch.fft.irfft(torch.fft.rfft(x)),
    "irfft_odd": lambda x: torch.fft.irfft(torch.fft.rfft(x), n=9),
    "irfft_shorter": lambda x: torch.fft.irfft(torch.fft.rfft(x), n=6),
    "irfft_longer": lambda x: torch.fft.irfft(torch.fft.rfft(x), n=16, norm="ortho"),
    "irfft2": lambda x: torch.fft.irfft2(torch.fft.rfft2(x)),
    "irfftn": lambda x: torch.fft.irfftn(torch.fft.rfftn(x, norm="forward"), norm="forward"),
    "hfft": lambda x: torch.fft.hfft(torch.fft.fft(x), n=8),
    "fft_padded": lambda x: torch.fft.fft(x, n=16).abs(),
    "fft_cropped": lambda x: torch.fft.fft(x, n=5).abs(),
    "fftshift": lambda x: torch.fft.ifftshift(torch.fft.fftshift(x, dim=1) * 2),
    "istft": lambda x: torch.istft(torch.stft(x.reshape(2, -1), 8, return_complex=True), 8),
}


@pytest.mark.parametrize("name", STATIC)
def test_at_a_known_length(name: str) -> None:
    torch.manual_seed(0)
    check(STATIC[name], (torch.randn(2, 5, 10),), atol=2e-5)


def test_a_real_inverse_of_even_dynamic_length() -> None:
    check(
        lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1)[:, 1:], dim=1),
        (torch.randn(2, 10),),
        (torch.randn(2, 16),),
        dynamic_axes=AXES,
    )


STFT: dict[str, dict] = {
    "plain": {},
    "normalised": {"normalized": True},
    "two_sided": {"onesided": False},
    "not_centred": {"center": False},
    "short_window": {"win_length": 10},
    "hop": {"hop_length": 3, "pad_mode": "constant"},
}


@pytest.mark.parametrize("name", STFT)
@pytest.mark.parametrize("window", [None, "stored", "computed"])
def test_short_time_transform(name: str, window: str | None) -> None:
    length = STFT[name].get("win_length", 16)

    class Spectrum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("window", torch.hann_window(length))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = {None: None, "stored": self.window, "computed": torch.hamming_window(length)}[window]
            return torch.view_as_real(torch.stft(x, 16, window=weights, return_complex=True, **STFT[name]))

    check(Spectrum(), (torch.randn(2, 80),), (torch.randn(2, 61),), dynamic_axes=AXES, atol=2e-5)


def test_a_real_inverse_of_an_even_or_an_odd_length() -> None:
    others = [(torch.randn(2, length),) for length in (1, 2, 3, 7, 16)]
    check(lambda x: torch.fft.irfft(torch.fft.rfft(x), n=x.shape[1]), (torch.randn(2, 10),), *others, dynamic_axes=AXES)


def test_a_convolution_of_two_dynamic_lengths() -> None:
    def convolved(x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        length = x.shape[1] + kernel.shape[1] - 1
        return torch.fft.irfft(torch.fft.rfft(x, length) * torch.fft.rfft(kernel, length), length)

    others = [(torch.randn(1, length), torch.randn(1, taps)) for length, taps in ((4, 3), (9, 2), (2, 8), (30, 11))]
    axes = {"input_0": {1: "T"}, "input_1": {1: "K"}}
    check(convolved, (torch.randn(1, 6), torch.randn(1, 5)), *others, dynamic_axes=axes)


def test_over_two_dynamic_axes() -> None:
    """FNet: over the positions and the features of each text, whose number and length are free."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fftn(x, dim=(1, 2)).real

    check(model, (torch.randn(3, 5, 4),), (torch.randn(1, 7, 4),), dynamic_axes={"input_0": {0: "B", 1: "S"}})


@pytest.mark.parametrize("count", [1, 6, 7])
def test_frequencies(count: int) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[:, None] * torch.fft.fftfreq(count, 0.5), x[:, None] * torch.fft.rfftfreq(count, d=2.0)

    check(model, (torch.randn(3),), (torch.randn(5),), dynamic_axes={"input_0": {0: "B"}})
