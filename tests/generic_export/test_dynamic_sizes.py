"""One export, every size: sizes that slice, split, scale and index, in the engine at sizes other than the example's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.errors import CaptureError, EngineRunError, MismatchError, SpecializedAxisError
from generic_export.inference_target.tract.engines.wheel import TractWheel
from tests.engine_check import Function, check
from tests.load_script import load_script
from tests.random_modules import RandomModule

random_sizes = load_script("random_sizes")

Case = Callable[..., torch.Tensor]

LENGTH = {"input_0": {0: "B", 1: "T"}}

ANY_LENGTH: dict[str, Case] = {
    "divided by the root of the length": lambda x: x / math.sqrt(x.shape[1]),
    "divided by the length": lambda x: x.mean(1) * (1.0 / x.shape[1]),
    "scaled by a power of the length": lambda x: x * x.shape[1] ** -0.5,
    "the first half, rounded up": lambda x: x[:, : math.ceil(x.shape[1] / 2)],
    "linspace over the length": lambda x: torch.linspace(-1, 1, x.shape[1])[None, :, None] * x,
    "linspace up to the length": lambda x: torch.linspace(0, x.shape[1] - 1, x.shape[1]).view(1, -1, 1) + x,
    "integers times the length": lambda x: (torch.arange(x.shape[1]) * x.shape[1]).float()[None, :, None] + x,
    "at most four": lambda x: x[:, :4],
    "the last four": lambda x: x[:, -4:],
    "the third and fourth": lambda x: x[:, 2:4],
    "padded to windows": lambda x: F.pad(x, (0, 0, 0, -x.shape[1] % 4)).unflatten(1, (-1, 4)).mean(2),
}


def _halves_in_windows(x: torch.Tensor) -> torch.Tensor:
    """Blocks of four of every second position, their size asked back from the number of blocks."""
    halves = F.avg_pool1d(x.transpose(1, 2), 2, 2).transpose(1, 2)
    filled = F.pad(halves, (0, 0, 0, -halves.shape[1] % 4))
    blocks = filled.shape[1] // 4
    return filled.reshape(x.shape[0], blocks, filled.shape[1] // blocks, 8).mean(2)


ANY_LENGTH["halves in windows"] = _halves_in_windows


@pytest.mark.parametrize("name", ANY_LENGTH)
def test_any_length(name: str) -> None:
    others = [(torch.randn(batch, length, 8),) for batch, length in ((1, 2), (1, 3), (3, 17))]
    check(ANY_LENGTH[name], (torch.randn(2, 9, 8),), *others, dynamic_axes=LENGTH)


ON_BOTH_SIDES: dict[str, Case] = {
    "the last eight": lambda x: x[:, -8:],
    "the first eight, doubled": lambda x: x[:, :8] * 2,
    "all but the first eight": lambda x: torch.cat([x[:, 8:], x], 1),
    "sections": lambda x: torch.cat([part * (place + 1) for place, part in enumerate(x.tensor_split(3, 1))], 1),
    "a rolled second half": lambda x: x[:, x.shape[1] // 2 :].roll(1, 1),
    "differences of what is left": lambda x: torch.cat([x[:, 4:][:, 1:] - x[:, 4:][:, :-1], x], 1),
    "incomplete windows": lambda x: F.max_pool1d(x.transpose(1, 2), 2, 3, ceil_mode=True),
    "incomplete windows in two axes": lambda x: F.avg_pool2d(x[:, None], 3, 3, 1, ceil_mode=True),
    "a softmax in a map": lambda x: torch.vmap(lambda row: row.softmax(-1))(x),
    "a map over the batch": lambda x: torch.vmap(lambda row: row.cumsum(0) * 2)(x),
    "rows of a table, summed": lambda x: (x + torch.linspace(0, 1, 64)[: x.shape[1], None]).cumsum(1),
    "every second of the last": lambda x: x[:, -9:][:, ::2],
    "the first of pieces of three": lambda x: x.split(3, 1)[0],
    "the first of four pieces": lambda x: torch.chunk(x, 4, dim=1)[0] * 2,
    "what PyTorch writes with broadcasts": lambda x: F.elu(F.elu(torch.addcmul(x, x, x)) - 1),
    "a loss of each": lambda x: F.huber_loss(F.softshrink(x), x * 2, reduction="none"),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ON_BOTH_SIDES)
def test_sizes_on_both_sides_of_every_number(name: str, batch: int) -> None:
    lengths = (6, 2, 3, 7, 8, 9, 10, 23) if batch == 1 else (13, 4, 5, 8, 9, 14)
    others = [(torch.randn(3 - batch, length, 8),) for length in lengths[1:]]
    check(ON_BOTH_SIDES[name], (torch.randn(batch, lengths[0], 8),), *others, dynamic_axes=LENGTH)


def _positions_of_each(x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[1])[None]
    if x.shape[0] != places.shape[0]:
        places = places.expand(x.shape[0], -1)
    return x + places.cumsum(-1)


@pytest.mark.parametrize("batch", [1, 2])
def test_what_larger_batches_alone_are_expanded_to(batch: int) -> None:
    others = [(torch.randn(other, length),) for other, length in ((3 - batch, 7), (1, 4), (3, 9))]
    check(_positions_of_each, (torch.randn(batch, 6),), *others, dynamic_axes=LENGTH)


def test_a_batch_of_one_that_is_something_else() -> None:
    with pytest.raises(SpecializedAxisError, match=r"Eq\(B, 1\)"):
        check(lambda x: x + 1 if x.shape[0] == 1 else x * 2, (torch.randn(1, 6),), dynamic_axes=LENGTH)


@pytest.mark.parametrize("batch", [1, 2])
def test_distances_between_few_and_many(batch: int) -> None:
    lengths = (30, 1, 7, 25, 26) if batch == 1 else (7, 26)
    others = [(torch.randn(3 - batch, length, 8),) for length in lengths[1:]]
    check(lambda x: torch.cdist(x, x * 2), (torch.randn(batch, lengths[0], 8),), *others, dynamic_axes=LENGTH)


def test_a_crop_of_the_middle_has_a_least_length() -> None:
    with pytest.warns(UserWarning, match="T >= 8"):
        check(
            lambda x: x[:, x.shape[1] // 2 - 4 : x.shape[1] // 2 + 4],
            *[(torch.randn(batch, length, 4),) for batch, length in ((1, 20), (2, 8), (1, 9), (3, 41))],
            dynamic_axes=LENGTH,
        )


def test_a_start_below_0_counts_from_the_end() -> None:
    with pytest.warns(UserWarning, match="T <= 7"):
        check(
            lambda x: x[:, x.shape[1] - 8 :],
            *[(torch.randn(batch, length, 4),) for batch, length in ((1, 6), (2, 7), (1, 5), (3, 1))],
            dynamic_axes=LENGTH,
        )


@pytest.mark.parametrize("all_of", [list, lambda pieces: [*pieces], lambda pieces: pieces[:]])
def test_a_split_is_held_to_its_number_of_parts(
    all_of: Callable[[tuple[torch.Tensor, ...]], Sequence[torch.Tensor]],
) -> None:
    with pytest.warns(UserWarning, match="T >= 3"):
        check(
            lambda x: all_of(x.split(x.shape[1] // 2 + 1, 1))[0],
            *[(torch.randn(batch, length, 4),) for batch, length in ((1, 9), (2, 3), (1, 4), (3, 41))],
            dynamic_axes=LENGTH,
        )


def test_a_piece_is_held_to_being_there() -> None:
    def second(x: torch.Tensor) -> torch.Tensor:
        return x.split(split_size=3, dim=1)[1]

    with pytest.warns(UserWarning, match=r"test_dynamic_sizes.py:\d+: the archive is correct where T >= 4"):
        check(second, *[(torch.randn(1, length, 4),) for length in (9, 4, 5, 6, 7, 23)], dynamic_axes=LENGTH)


def test_all_pieces_go_into_a_function_of_pytorch() -> None:
    check(
        lambda x: torch.cat(x.chunk(2, 1)[::-1], 1) + torch.cat(tensors=x.split(x.shape[1], 1), dim=1),
        *[(torch.randn(2, length, 4),) for length in (9, 2, 5, 6)],
        dynamic_axes=LENGTH,
    )


def test_sizes_that_meet_at_multiples_alone_are_declared(tmp_path: Path) -> None:
    def ladder(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([F.interpolate(F.avg_pool1d(x, 2), scale_factor=2), x], 1)

    target = TractNNEF(dynamic_axes={"x": {0: "B", 2: "T"}})
    with pytest.warns(UserWarning, match=r"DynamicSize\('T', multiple_of=2\)"):
        archive = export_model_to_nnef(
            Function(ladder), torch.randn(2, 4, 8), tmp_path / "m", target, input_names=["x"]
        )
    with TractWheel(timeout_seconds=60).load(archive) as engine:
        x = torch.randn(1, 4, 14)
        np.testing.assert_allclose(engine.run([x.numpy()])[0], ladder(x), atol=1e-6)
        with pytest.raises(EngineRunError):
            engine.run([torch.randn(1, 4, 7).numpy()])


def _masked_write(x: torch.Tensor) -> torch.Tensor:
    copy = x.clone()
    copy[copy > 0.5] = copy[copy > 0.5] * 2
    return copy


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (_masked_write, r"size of the result of index depends on values.*torch\.where\(mask, new, old\)"),
        (lambda x: x.flatten().nonzero() + 1, "size of the result of nonzero depends on values"),
        (lambda x: torch.unique(x), r"size of the result of _unique2 depends on values.*Call torch\.unique outside"),
    ],
)
def test_a_size_that_depends_on_values_names_its_operator(function: Case, said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        check(function, (torch.randn(2, 9, 8),), dynamic_axes=LENGTH)


def test_the_fast_path_of_padded_batches_is_explained(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(layer, 1)

        def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
            return self.encoder(x, src_key_padding_mask=padding).sum(1)

    padding = torch.arange(6)[None] >= torch.tensor([[6], [4]])
    with pytest.raises(MismatchError, match="set_fastpath_enabled"):
        export_model_to_nnef(Padded(), (torch.randn(2, 6, 8), padding), tmp_path / "m", TractNNEF())


@pytest.mark.parametrize("seed", [3, 8, 11, 16])
def test_random_modules_are_right_or_refused(seed: int) -> None:
    kind, why = random_sizes.judged(RandomModule(seed).eval(), 10)
    assert kind in (random_sizes.RIGHT, random_sizes.RUN, random_sizes.EXPORT), why


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_random_modules_are_right_or_refused(seed: int) -> None:
    kind, why = random_sizes.judged(RandomModule(seed).eval(), 10)
    assert kind in (random_sizes.RIGHT, random_sizes.RUN, random_sizes.EXPORT, random_sizes.ENDLESS, ""), why


WITH_PAST: dict[str, Case] = {
    "the new ones, counted from the end": lambda past, x: torch.cat([past, x], 1)[:, -x.shape[1] :],
    "all but as many as are new": lambda past, x: torch.cat([past, x], 1)[:, : -x.shape[1]],
    "shifted by one": lambda past, x: torch.cat([past, x], 1)[:, -x.shape[1] - 1 : -1],
    "the first new one": lambda past, x: torch.cat([past, x], 1)[:, -x.shape[1]],
    "narrow": lambda past, x: torch.cat([past, x], 1).narrow(1, past.shape[1], x.shape[1]),
}


@pytest.mark.parametrize("name", WITH_PAST)
def test_positions_counted_by_another_size(name: str) -> None:
    arguments = [(torch.randn(2, past, 3), torch.randn(2, new, 3)) for past, new in ((5, 3), (1, 2), (3, 3), (2, 9))]
    check(WITH_PAST[name], *arguments, dynamic_axes={"input_0": {1: "P"}, "input_1": {1: "T"}})


def test_windows_of_an_axis_that_is_a_multiple() -> None:
    arguments = [(torch.randn(batch, length, 8),) for batch, length in ((2, 8), (1, 4), (3, 12))]
    check(lambda x: x.view(x.shape[0], x.shape[1] // 4, 4, 8).sum(2), *arguments, dynamic_axes=LENGTH)


@pytest.mark.parametrize("module", [nn.PixelUnshuffle(2), nn.PixelShuffle(2)], ids=["unshuffle", "shuffle"])
def test_pixels_of_an_image_of_any_even_size(module: nn.Module) -> None:
    images = [(torch.randn(batch, 4, *sides),) for batch, *sides in ((1, 8, 8), (2, 10, 12))]
    check(module, *images, dynamic_axes={"input_0": {0: "B", 2: "H", 3: "W"}})


@pytest.mark.parametrize(
    "frozen",
    [lambda x: sum(x[:, place] for place in range(x.shape[1])), lambda x: x * math.log(x.shape[1])],
    ids=["loop over an axis", "logarithm"],
)
def test_what_pytorch_freezes_is_refused_with_its_line(frozen: Case) -> None:
    with pytest.raises(SpecializedAxisError, match=r"test_dynamic_sizes\.py:\d+: a dynamic axis is restricted"):
        check(Function(frozen), (torch.randn(2, 9, 8),), dynamic_axes=LENGTH)


def _random_sums(length: int) -> list[int]:
    """Return forty numbers of some sizes, quotients and distances of one length."""
    dice = Random(0)
    sums = []
    for _ in range(40):
        total = dice.randint(-4, 4) * length + dice.randint(-3, 9)
        for _ in range(dice.randint(1, 2)):
            dividend = dice.randint(1, 3) * length + dice.randint(-1, 5)
            total += dice.choice([-3, -2, -1, 1, 2]) * (dividend // dice.randint(2, 4))
        sums.append(total)
    return sums


def test_the_engine_computes_sums_of_quotients_as_python_does() -> None:
    def counted(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.full((), total, dtype=torch.int64) for total in _random_sums(x.shape[0])])

    check(counted, *[(torch.randn(length),) for length in (7, 1, 2, 8, 30)], dynamic_axes={"input_0": {0: "T"}})
