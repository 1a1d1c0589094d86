"""How far an engine's tensor may be from PyTorch's, and how far it is.

In: arrays of both. Out: `Metrics`. An error passes when it is below a floor for the element type, or within a few times what
PyTorch itself is off in that element type (against the same computed in float64).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from generic_export.diagnose.records import Metrics

Array = np.ndarray

# Of the root mean square of the output; the rounding steps of these types are 6e-8, 5e-4 and 4e-3.
FLOORS = {"float64": 1e-9, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
OWN_ERROR_FACTOR = 4.0


@dataclass(frozen=True)
class Judge:
    """The limits of a comparison.

    Attributes:
        atol, rtol: limits given by the user, |a - b| <= atol + rtol * |b|; None for the measured ones.
    """

    atol: float | None = None
    rtol: float | None = None

    def metrics(
        self,
        name: str,
        set_index: int,
        answer: Array,
        reference: Array,
        dtype: str,
        exact: Callable[[], Array | None],
    ) -> Metrics:
        """Compare one output.

        Args:
            name: of the output.
            set_index: the input set.
            answer: the engine's.
            reference: PyTorch's.
            dtype: element type that PyTorch computed in.
            exact: gives the same output computed in float64, when asked; None where that is impossible.
        """
        reason = _reason(answer, reference)
        if reason:
            return Metrics(name, set_index, False, math.inf, math.inf, -math.inf, 0.0, 0.0, reason=reason)
        if reference.dtype.kind != "f":
            return _exact_metrics(name, set_index, answer, reference)
        left, right = answer.astype(np.float64), reference.astype(np.float64)
        error = _errors(left, right)
        worst = float(error.max(initial=0.0))
        finite = np.where(np.isfinite(right), right, 0.0)
        rms = float(np.sqrt(np.mean(np.square(finite)))) if finite.size else 0.0
        allowed, own, passed = self._judged(error, right, worst, rms, dtype, exact)
        top1, kl = _logit_agreement(left, right) if "logits" in name else (None, None)
        return Metrics(
            name,
            set_index,
            passed,
            worst,
            worst / rms if rms else (0.0 if worst == 0 else math.inf),
            _snr(error, finite),
            _cosine(left, right),
            allowed,
            own,
            top1,
            kl,
        )

    def _judged(
        self,
        error: Array,
        reference: Array,
        worst: float,
        rms: float,
        dtype: str,
        exact: Callable[[], Array | None],
    ) -> tuple[float, float | None, bool]:
        """Return the largest error that is allowed, PyTorch's own error, and whether the comparison passes."""
        if self.atol is not None or self.rtol is not None:
            scale = np.where(np.isfinite(reference), np.abs(reference), 0.0)
            limits = (self.atol or 0.0) + (self.rtol or 0.0) * scale
            return float(limits.max(initial=0.0)), None, bool(np.all(error <= limits))
        allowed = FLOORS.get(dtype, FLOORS["float32"]) * rms
        if worst <= allowed:
            return allowed, None, True
        precise = exact()
        if precise is None or precise.shape != reference.shape:
            return allowed, None, False
        own = float(_errors(reference, precise.astype(np.float64)).max(initial=0.0))
        if math.isfinite(own):
            allowed = max(allowed, OWN_ERROR_FACTOR * own)
        return allowed, own, worst <= allowed


def _reason(answer: Array, reference: Array) -> str:
    if answer.shape != reference.shape:
        return f"shape {list(answer.shape)}, but PyTorch has {list(reference.shape)}"
    both_float = answer.dtype.kind == reference.dtype.kind == "f"
    if answer.dtype != reference.dtype and not both_float:
        return f"dtype {answer.dtype}, but PyTorch has {reference.dtype}"
    return ""


def _exact_metrics(name: str, set_index: int, answer: Array, reference: Array) -> Metrics:
    different = int(np.count_nonzero(answer != reference))
    error = float(np.abs(answer.astype(np.float64) - reference.astype(np.float64)).max(initial=0.0))
    share = different / reference.size if reference.size else 0.0
    snr = math.inf if not different else -math.inf
    return Metrics(name, set_index, not different, error, share, snr, 1.0 if not different else 0.0, 0.0)


def _errors(left: Array, right: Array) -> Array:
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where(same, 0.0, np.abs(left - right))
    return np.where(np.isnan(error), np.inf, error)


def _snr(error: Array, reference: Array) -> float:
    noise, signal = float(np.sum(np.square(error))), float(np.sum(np.square(reference)))
    if noise == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal > 0.0 and math.isfinite(noise) else -math.inf


def _cosine(left: Array, right: Array) -> float:
    left, right = np.nan_to_num(left.ravel()), np.nan_to_num(right.ravel())
    norms = float(np.linalg.norm(left)) * float(np.linalg.norm(right))
    if norms == 0.0:
        return 1.0 if np.array_equal(left, right) else 0.0
    return float(np.clip(np.dot(left, right) / norms, -1.0, 1.0))


def _logit_agreement(left: Array, right: Array) -> tuple[float | None, float | None]:
    """Return the share of rows with the same arg max, and the mean KL divergence of the engine's from PyTorch's, in nats."""
    if left.ndim < 2 or left.shape[-1] < 2 or not left.size:
        return None, None
    rows, others = left.reshape(-1, left.shape[-1]), right.reshape(-1, right.shape[-1])
    top1 = float(np.mean(rows.argmax(-1) == others.argmax(-1)))
    log_p, log_q = _log_softmax(others), _log_softmax(rows)
    return top1, max(0.0, float(np.mean(np.sum(np.exp(log_p) * (log_p - log_q), axis=-1))))


def _log_softmax(rows: Array) -> Array:
    shifted = np.nan_to_num(rows - rows.max(axis=-1, keepdims=True), neginf=-1e30)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


__all__ = ["FLOORS", "Judge"]
