"""The pip-installed tract, run in a child process: one child per open model.

In: an archive path and arrays. Out: `LoadedModel`, whose failures are always exceptions of `errors.py`.
A panic in tract aborts the process it lives in (docs/contributing/engine-facts.md#what-aborts-the-process);
here that process is `wheel_worker.py`.
"""

from __future__ import annotations

import importlib.metadata
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from generic_export.devices import CPU, check_device
from generic_export.errors import EngineLoadError, EngineMissingError, EngineRunError, OptionError
from generic_export.inference_target.tract.engines.device_forms import refuse_wrong_forms
from generic_export.inference_target.tract.engines.engine import (
    Array,
    EngineNode,
    IoFact,
    LoadTimes,
    Profile,
    condense_error,
    conform_inputs,
)
from generic_export.inference_target.tract.engines.features import DEFAULT_REGISTRIES
from generic_export.inference_target.tract.engines.measure import (
    device_missing,
    example_inputs,
    read_nodes,
    read_profile,
)
from generic_export.inference_target.tract.engines.wheel_process import INSTALL_HINT, WorkerConnection


class TractWheel:
    """tract as installed by pip, behind process isolation.

    Args:
        timeout_seconds: how long one request (a load, a run) may take before the child is killed.
        packages: folder whose tract runs, for releases beside the installed one (`releases.wheels`); None for that one.
        device: "cpu", "cuda" or "metal"; whether there is one shows when an archive is loaded.
        threads: as many as the engine may take where it takes several; None leaves that to the environment.
    Raises:
        OptionError: an unknown device.
    """

    name = "wheel"

    def __init__(
        self,
        *,
        timeout_seconds: float = 600.0,
        packages: Path | None = None,
        device: str = CPU,
        threads: int | None = None,
    ) -> None:
        check_device(device)
        self.timeout_seconds = timeout_seconds
        self.packages = packages
        self.device = device
        self.threads = threads

    @property
    def version(self) -> str:
        """Version of the package, read from its metadata without importing it.

        Raises:
            EngineMissingError: the package is not installed.
        """
        if self.packages is not None:
            return _version_in(self.packages)
        try:
            return importlib.metadata.version("tract")
        except importlib.metadata.PackageNotFoundError:
            raise EngineMissingError("the Python package tract is not installed.", INSTALL_HINT) from None

    def load(
        self, archive: Path, *, transforms: Sequence[str] = (), registries: Sequence[str] = DEFAULT_REGISTRIES
    ) -> WheelModel:
        """Load an archive in a child process: a new one, except inside `reuse_workers()`.

        Args:
            archive: folder, `.tar` or gzipped tar with graph.nnef at its root.
            transforms: tract transforms applied in order, each a name ("transformers_detect_all") or a JSON
                object ('{"name": "set_symbols", "values": {"S": 1}}').
            registries: operators enabled beside tract's core, by the registries' names.
        Returns:
            The loaded model; use it in a `with` block, or call `close`.
        Raises:
            EngineMissingError: tract is not installed.
            DeviceMissingError: tract cannot compute on the device asked for.
            WrongOnDeviceError: the device would compute a form of the graph wrongly.
            EngineLoadError: tract refuses the archive or a transform.
            EngineCrashError, EngineTimeoutError: the child died, or did not answer in time.
            OptionError: a transform is written in a form that the wheel ignores.
        """
        _check_transforms(transforms)
        path = Path(archive).absolute()
        if not path.exists():
            raise EngineLoadError(f"{path}: no such archive.")
        version = self.version  # EngineMissingError before a process is started
        refuse_wrong_forms(path, self.device, version, transforms)
        worker = WorkerConnection(path.name, self.timeout_seconds, self.packages, self.threads)
        try:
            self._choose_device(worker)
            facts = worker.request("load", str(path), list(transforms), list(registries), refusal=EngineLoadError)
        except BaseException:
            worker.close()
            raise
        inputs, outputs = (tuple(IoFact(*fact) for fact in side) for side in facts)
        return WheelModel(worker, inputs, outputs)

    def dump(self, archive: Path, *, transforms: Sequence[str] = ()) -> tuple[EngineNode, ...]:
        """List the nodes of the optimised graph; see `Engine.dump`."""
        with self.load(archive, transforms=transforms) as model:
            return model.dump()

    def profile(self, archive: Path, sizes: Mapping[str, int], *, transforms: Sequence[str] = ()) -> Profile:
        """Time every node; see `Engine.profile`."""
        with self.load(archive, transforms=transforms) as model:
            return model.profile(example_inputs(model.inputs, sizes))

    def require_device(self) -> None:
        """Look for the device, before there is an archive to load.

        Raises:
            EngineMissingError: tract is not installed.
            DeviceMissingError: tract cannot compute on it.
        """
        _ = self.version
        if self.device == CPU:
            return
        worker = WorkerConnection(self.device, self.timeout_seconds, self.packages, self.threads)
        try:
            self._choose_device(worker)
        finally:
            worker.close()

    def _choose_device(self, worker: WorkerConnection) -> None:
        if self.device == CPU:
            return
        reason = worker.request("use_device", self.device)
        if reason is not None:
            raise device_missing(f"tract {self.version} from pip", self.device, condense_error(reason, context=0))


def convert_with_wheel(
    model: Path,
    archive: Path,
    *,
    registries: Sequence[str],
    timeout_seconds: float = 600.0,
    packages: Path | None = None,
) -> None:
    """Let tract read a model (`.onnx`, or an NNEF archive) and write it as a gzipped NNEF archive of its own.

    Raises:
        EngineMissingError: tract is not installed.
        EngineLoadError: tract cannot read the model, or has no NNEF form for it.
        EngineCrashError, EngineTimeoutError: the child died, or did not answer in time.
    """
    _ = TractWheel(packages=packages).version
    worker = WorkerConnection(model.name, timeout_seconds, packages)
    try:
        paths = str(model.absolute()), str(archive.absolute())
        worker.request("convert", *paths, list(registries), refusal=EngineLoadError)
    finally:
        worker.close()


def _version_in(packages: Path) -> str:
    """Return the version of the tract that lies in a folder."""
    for found in importlib.metadata.distributions(name="tract", path=[str(packages)]):
        return found.version
    raise EngineMissingError(f"{packages} holds no package tract.", "Give the folder that pip install --target filled.")


def _check_transforms(transforms: Sequence[str]) -> None:
    for transform in transforms:
        if "(" in transform and not transform.lstrip().startswith("{"):
            # docs/contributing/engine-facts.md#transforms: name(key: value) works in the command only; here tract
            # drops the parameters.
            raise OptionError(f"transform {transform!r}: the wheel ignores parameters in parentheses.", "Use JSON.")


class WheelModel:
    """A `LoadedModel` living in a child process. Methods may be called from any thread, one at a time.

    Attributes:
        inputs: declared inputs, in the order `run` takes them.
        outputs: declared outputs, in the order `run` returns them.
    """

    def __init__(self, worker: WorkerConnection, inputs: tuple[IoFact, ...], outputs: tuple[IoFact, ...]) -> None:
        self._worker = worker
        self.inputs = inputs
        self.outputs = outputs

    @property
    def pid(self) -> int:
        """Process id of the child, for whoever watches its memory."""
        return self._worker.pid

    @property
    def alive(self) -> bool:
        """Whether it can still be asked; not so once its child is known to have died, or to have been stopped."""
        return self._worker.alive

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        """Run once on a fresh state.

        Args:
            inputs: one array per declared input; never cast.
        Returns:
            One array per declared output.
        Raises:
            EngineRunError: an input does not fit its fact, or tract returned an error.
            EngineCrashError, EngineTimeoutError: the child died, or did not answer in time; the model is gone.
        """
        outputs: list[Array] = self._worker.request("run", conform_inputs(self.inputs, inputs))
        return outputs

    def spawn_state(self) -> WheelSession:
        """Open a session: what tract keeps between runs (KV caches, scan states) starts empty and persists."""
        return WheelSession(self._worker, self._worker.request("spawn"), self.inputs)

    def operators(self) -> Counter[str]:
        """Count the nodes of the graph tract really runs, after transforms, declutter and code generation.

        Every node counts, `Source` and `Const` and the nodes of loop bodies included; names are tract's
        ("OptMatMul", "FlashSDPA", "InPlaceKvSdpa"). Nothing is run. `TractCli.operators` counts the same.
        """
        return Counter(node.operator for node in self.dump())

    def dump(self) -> tuple[EngineNode, ...]:
        """List the nodes that `operators` counts, with what tract says each one costs. Nothing is run."""
        return read_nodes(self._worker.request("dump"))

    def profile(self, inputs: Sequence[Array]) -> Profile:
        """Time every node over about five seconds of runs, each on a fresh state.

        Args:
            inputs: as `run`.
        Raises:
            EngineRunError, EngineCrashError, EngineTimeoutError: as `run`.
        """
        return read_profile(self._worker.request("profile", conform_inputs(self.inputs, inputs)))

    def time_turns(self, turns: Sequence[Sequence[Array]]) -> list[float]:
        """Run turns one after another on one fresh state, and time each inside the child.

        Args:
            turns: the inputs of each turn, as `run` takes them.
        Returns:
            Seconds a turn: the engine's alone, without the way of arrays between the processes.
        Raises:
            EngineRunError, EngineCrashError, EngineTimeoutError: as `run`.
        """
        seconds: list[float] = self._worker.request("time_turns", [conform_inputs(self.inputs, turn) for turn in turns])
        return seconds

    def properties(self) -> dict[str, Array]:
        """Return the model's properties that are numbers, by name; those of the document, and those that transforms add."""
        found: dict[str, Array] = self._worker.request("properties")
        return found

    def load_times(self) -> LoadTimes:
        """Return how long the load took, by step."""
        return LoadTimes(**self._worker.request("timings"))

    def peak_rss_bytes(self) -> int:
        """Return the child's peak resident size so far, in bytes (its own only, not the parent's)."""
        peak: int = self._worker.request("peak_rss")
        return peak

    def close(self) -> None:
        """End the child process, or free it for the next model inside `reuse_workers()`. Closing twice is harmless."""
        self._worker.close()

    def __enter__(self) -> WheelModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class WheelSession:
    """A `EngineSession` in the child process. Its state is freed on `close` or when the object is collected."""

    def __init__(self, worker: WorkerConnection, session: int, inputs: tuple[IoFact, ...]) -> None:
        self._worker = worker
        self._session = session
        self._declared = self._inputs = inputs
        self._forget = weakref.finalize(self, worker.closed_sessions.append, session)
        self._forget.atexit = False

    def hold(self, inputs: Mapping[str, Array]) -> None:
        """Keep some inputs for all turns that follow, which are given the others: they cross to the child once.

        Args:
            inputs: by name; what was held before is forgotten.

        Raises:
            EngineRunError: the model has no such input, or one does not fit its fact.
        """
        places = {fact.name: place for place, fact in enumerate(self._declared)}
        unknown = [name for name in inputs if name not in places]
        if unknown:
            raise EngineRunError(f"the model takes no input {unknown[0]!r}.", f"It takes {', '.join(places)}.")
        facts = [self._declared[places[name]] for name in inputs]
        conformed = conform_inputs(facts, list(inputs.values()))
        held = {places[name]: array for name, array in zip(inputs, conformed, strict=True)}
        self._worker.request("hold", self._session, held)
        self._inputs = tuple(fact for place, fact in enumerate(self._declared) if place not in held)

    def feed_back(self, inputs: Sequence[Array]) -> None:
        """Keep the last inputs in the child: the last outputs of each turn, as many, become those of the next.

        Args:
            inputs: of the first turn; turns are given the others, and return the other outputs.

        Raises:
            EngineRunError: one does not fit its fact.
        """
        first = len(self._inputs) - len(inputs)
        self._worker.request("feed_back", self._session, conform_inputs(self._inputs[first:], inputs))
        self._inputs = self._inputs[:first]

    def cut(self, axes: Sequence[int], length: int) -> None:
        """Leave the first `length` entries along one axis of each input that is fed back; one axis for each of them."""
        self._worker.request("cut", self._session, list(axes), length)

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        """Run one turn on what is not held; see `WheelModel.run`. After an engine error tract refuses every later turn."""
        if not self._forget.alive:
            raise EngineRunError("the session is closed.", "Open another one with spawn_state().")
        outputs: list[Array] = self._worker.request("turn", self._session, conform_inputs(self._inputs, inputs))
        return outputs

    def time_turns(self, turns: Sequence[Sequence[Array]]) -> list[float]:
        """Run turns and time each inside the child; see `WheelModel.time_turns`."""
        asked = [conform_inputs(self._inputs, turn) for turn in turns]
        seconds: list[float] = self._worker.request("time_turns", asked, self._session)
        return seconds

    def close(self) -> None:
        """Free the state. Closing twice is harmless."""
        if self._forget.alive:
            self._forget()
            if self._worker.alive:
                self._worker.request("forget", [])  # any request carries the closed sessions along
