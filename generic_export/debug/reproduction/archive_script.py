"""Repeat the check of a debug bundle: `python reproduce.py` in its folder. Needs only numpy and `pip install tract`.

In: `model/`, `inputs.npz`, `outputs.npz` (what PyTorch says) and `report.json` beside this file. Out: how far tract is from
PyTorch, output by output; exit code 1 when one is beyond the tolerance.
"""

import json
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ENABLERS = {
    "tract_transformers": "with_tract_transformers",
    "tract_extra": "with_tract_extra",
    "tract_onnx": "with_onnx",
    "tract_pulse": "with_pulse",
}


def restore_weights() -> None:
    """Make the random weights that the bundle only records, if it came without weights."""
    record = HERE / "weights.json"
    for tensor in json.loads(record.read_text()) if record.exists() else []:
        normal = np.random.default_rng(tensor["seed"]).standard_normal(tensor["shape"], np.float32)
        values = (normal * np.float32(tensor["scale"]) + np.float32(tensor["shift"])).astype(tensor["dtype"])
        path = HERE / "model" / f"{tensor['label']}.dat"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes.fromhex(tensor["header"]) + values.tobytes())


def ask_tract(registries: list[str]) -> list[np.ndarray]:
    """Run the model on the bundle's inputs."""
    import tract

    loader = tract.nnef()
    for registry in registries:
        loader = getattr(loader, ENABLERS[registry])()
    with np.load(HERE / "inputs.npz") as inputs:
        arrays = [inputs[name] for name in inputs.files]
    return [tensor.to_numpy() for tensor in loader.load(str(HERE / "model")).into_runnable().run(arrays)]


def main() -> int:
    """Compare and print."""
    report = json.loads((HERE / "report.json").read_text())
    restore_weights()
    answers = ask_tract(report["registries"])
    failed = False
    with np.load(HERE / "outputs.npz") as expected:
        for answer, (name, limits) in zip(answers, report["limits"].items(), strict=True):
            reference = expected[name]
            if answer.shape != reference.shape or answer.dtype != reference.dtype:
                print(f"{name}: tract {answer.dtype} {answer.shape}, PyTorch {reference.dtype} {reference.shape}")
                failed = True
                continue
            with np.errstate(invalid="ignore"):
                error = np.abs(answer.astype(np.float64) - reference.astype(np.float64))
            same = (answer == reference) | ((answer != answer) & (reference != reference))
            error = np.where(same, 0.0, np.where(np.isnan(error), np.inf, error))
            allowed = limits["absolute"] + limits["relative"] * np.abs(np.nan_to_num(reference.astype(np.float64)))
            beyond = float(np.mean(error > allowed)) if error.size else 0.0
            failed |= beyond > limits["outliers"]
            print(
                f"{name}: max abs error {error.max(initial=0.0):.3g}, {beyond:.2%} of {error.size} beyond the tolerance"
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
