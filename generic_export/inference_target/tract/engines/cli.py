"""The `tract` command: the engine as its own project runs it, and a check that anyone can paste and repeat.

In: an archive and an npz bundle of inputs and expected outputs. Out: `CliCheck`, or the outputs as arrays.
Facts about flags and npz files were found by running 0.23.9; they stand in the docstrings here.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import numpy as np

from generic_export.compare.comparison import ToleranceLimits, TractCheckTolerance, tolerance_of
from generic_export.devices import CPU, check_device
from generic_export.errors import (
    EngineCrashError,
    EngineError,
    EngineLoadError,
    EngineMissingError,
    EngineRunError,
    EngineTimeoutError,
    OptionError,
)
from generic_export.inference_target.tract.engines.device_forms import DETECT_ALL, refuse_wrong_forms
from generic_export.inference_target.tract.engines.engine import Array, EngineNode, Profile, condense_error, last_words
from generic_export.inference_target.tract.engines.features import DEFAULT_REGISTRIES
from generic_export.inference_target.tract.engines.measure import (
    LlmBench,
    device_missing,
    read_llm_bench,
    read_nodes,
    read_profile,
)
from generic_export.inference_target.tract.engines.npz_bundle import read_turns
from generic_export.inference_target.tract.engines.npz_bundle import write_bundle as write_bundle
from generic_export.inference_target.tract.releases.downloader import INSTALL_COMMAND, TractBinaryDownloader
from generic_export.inference_target.tract.releases.install import (
    TRACT_CLI_VERSION,
    binaries_on_path,
    cargo_command,
    installed_path,
    probe_version,
)
from generic_export.inference_target.version import SemanticVersion

# atol, rtol for f32 (and f16): close 1e-7, 1e-7 (1e-3, 1e-3); approximate 1e-4, 5e-4 (1e-3, 5e-3);
# very 5e-2, 1e-2; super 0.1, 0.05; ultra 0.2, 0.1, the last two with 0.01 % and 0.05 % of outliers.
Approximation = Literal["exact", "close", "approximate", "very", "super", "ultra"]

_RUST_PANIC_EXIT_CODE = 101
_USAGE_EXIT_CODE = 2
_LOG_LINE = re.compile(r"^\[\S+ (ERROR|WARN|INFO|DEBUG|TRACE)\s+\S+\] (.*)$")
# Set for the child only: what it must log for us to know which inputs it took and which outputs it compared.
_LOG_FILTER = "warn,tract::params=info,tract::utils=debug,tract_libcli::tensor=debug"
_FED_INPUT = re.compile(r"(?:Using fixed input|Casting input to F16) for input called (\S+) \(")
_UNCHECKED = re.compile(r"DEBUG tract::utils\] Missing reference output in bundle for (\S+)")
_NO_THREADS = "compiled without multithread support"
_NO_DEVICE = re.compile(r"Runtime `\w+' not found|driver|dependencies not found", re.IGNORECASE)
_RESULTS = ("Checked output", "LLM RBO")
_INSTALL_HINT = f"Where there is a network, run: {INSTALL_COMMAND}"
_OUTPUT_TAIL_LINES = 40

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CliCheck:
    """The verdict of one `tract ... run --assert-output-bundle`.

    Attributes:
        passed: every output found in the bundle is within tolerance, and at least one was found.
        command: the command line that ran; paste it into a shell to see it again.
        output: what it said about the outputs, without the rest of its log.
        checked_outputs: how many outputs were compared and found good.
        unchecked_outputs: names of the outputs that the bundle does not hold.
    """

    passed: bool
    command: str
    output: str
    checked_outputs: int
    unchecked_outputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class CommandOptions:
    """How to run a bundle, and how to judge what comes out.

    Attributes:
        llm: run as a language model: `--llm`, which detects KV caches and the like.
        approximation: tolerance level.
        atol, rtol, outliers: tolerance given by number instead; outliers is a fraction.
        allow_float_casts: let f32 entries meet f16 inputs and outputs. npz entries are never f16.
        unfold_kv_cache: give detected caches back as inputs and outputs.
        prompt_chunk_size: feed a long prompt in pieces of this many tokens; the expected outputs are then those of the
            last piece.
        rank_biased_overlap: compare the order of the largest values instead, all outputs alike, and pass from this
            similarity on. Only the 100 largest weigh in: a perfect match scores 0.99, and with V values in all at most
            1 - 0.9**V.
        allow_missing_outputs: skip outputs that the bundle does not hold; by default with `llm` only.
        transforms: further transforms, after the detection: `name` or `name(key: value)`.
        registries: operators enabled beside tract's core when `llm` is off.
    """

    llm: bool = True
    approximation: Approximation = "close"
    atol: float | None = None
    rtol: float | None = None
    outliers: float = 0.0
    allow_float_casts: bool = False
    unfold_kv_cache: bool = True
    prompt_chunk_size: int | None = None
    rank_biased_overlap: float | None = None
    allow_missing_outputs: bool | None = None
    transforms: Sequence[str] = ()
    registries: Sequence[str] = DEFAULT_REGISTRIES

    def __post_init__(self) -> None:
        if self.approximation not in get_args(Approximation):
            raise OptionError(f"approximation {self.approximation!r}: choose one of {get_args(Approximation)}.")
        if not 0 <= (self.rank_biased_overlap or 0) <= 1:
            raise OptionError(f"rank_biased_overlap {self.rank_biased_overlap}: a similarity between 0 and 1.")

    def model_flags(self) -> list[str]:
        """Flags that stand before the subcommand: registries, then transforms in order."""
        # By default the registries of the wheel, so that both engines accept the same archives.
        flags = ["--llm"] if self.llm else [f"--nnef-{name.replace('_', '-')}" for name in self.registries]
        unfold = ["unfold-kv-cache"] if self.llm and self.unfold_kv_cache else []
        for transform in (*unfold, *self.transforms):
            flags += ["--transform", transform]
        return flags

    def run_flags(self) -> list[str]:
        """Flags of `run` that say how inputs are fed."""
        flags = ["--allow-float-casts"] if self.allow_float_casts else []
        if self.prompt_chunk_size is not None:
            flags += ["--prompt-chunk-size", str(self.prompt_chunk_size)]
        return flags

    def judge_flags(self) -> list[str]:
        """Flags of `run` that say how outputs are compared."""
        missing = self.allow_missing_outputs
        flags = ["--allow-missing-outputs"] if (self.llm if missing is None else missing) else []
        if self.rank_biased_overlap is not None:
            return [*flags, "--assert-llm-rbo", f"{self.rank_biased_overlap:g}"]
        if self.atol is None and self.rtol is None:
            return [*flags, "--approx", self.approximation]
        return [*flags, "--approx-custom", f"{self.atol or 0.0:g},{self.rtol or 0.0:g},{self.outliers:g}"]


def options_within(tolerance: TractCheckTolerance | ToleranceLimits, **further: Any) -> CommandOptions:
    """Return the options with which a plain graph, no language model, is judged within a tolerance."""
    if isinstance(tolerance, ToleranceLimits):
        limits = tolerance.absolute, tolerance.relative, tolerance.outliers
        return CommandOptions(llm=False, atol=limits[0], rtol=limits[1], outliers=limits[2], **further)
    return CommandOptions(llm=False, approximation=tolerance.value, **further)


class TractCli:
    """The `tract` command.

    The executable is searched in this order: `tract_path`, `$TRACT_BINARY`, `tract` or `tract-cli` on PATH (unrelated programs
    of that name are skipped), and the cache that `download` fills.

    Args:
        tract_path: path of the executable; None searches for it.
        timeout_seconds: time after which a command is killed.
        device: "cpu", "cuda" or "metal". A missing device is reported when a command runs.
        threads: threads of matrix products. More than one needs tract's build feature `multithread-mm`, which
            scripts/install_tract_cli enables.

    Raises:
        EngineMissingError: no executable was found, or `tract_path` is not tract.
        OptionError: the device is unknown, or `threads` is below 1.
    """

    name = "cli"

    def __init__(
        self,
        tract_path: str | Path | None = None,
        *,
        timeout_seconds: float = 600.0,
        device: str = CPU,
        threads: int = 1,
    ) -> None:
        check_device(device)
        if threads < 1:
            raise OptionError(f"threads is {threads}.", "Use 1 or more.")
        self.threads = threads
        self.timeout_seconds = timeout_seconds
        self.device = device
        self.binary, self._version = _find(None if tract_path is None else Path(tract_path))

    @classmethod
    def download(cls, version: str | SemanticVersion = TRACT_CLI_VERSION) -> TractCli:
        """Return the command in a given version. It is downloaded into the user's cache if it is not installed.

        Args:
            version: tract release, such as "0.23.9".

        Raises:
            EngineMissingError: it is not installed and could not be downloaded.
        """
        return cls(TractBinaryDownloader(version).dl_tract())

    @property
    def version(self) -> str:
        """Version reported by `tract --version`."""
        return self._version

    def check_bundle(self, archive: Path, bundle: Path, options: CommandOptions | None = None) -> CliCheck:
        """Run an archive on the inputs of a bundle and let tract compare the outputs with those of the bundle.

        Behavior of tract 0.23.9, as observed:
        - Entries are named `name` or `turn_N/name`. Several turns run one after another on the same state.
        - Only the outputs of the last turn are compared, with the *first* value of that name in the bundle. A bundle of several
          turns therefore holds the inputs of each turn and the expected outputs of the last one, as `write_bundle` writes it. To
          check every turn, write one bundle per turn.
        - Values are compared in f32. Shapes must be equal, and NaN equals NaN.
        - With `unfold_kv_cache`, caches are inputs again and are fed from turn to turn. Each cache output is named
          `<cache input>_concat` and is compared under this name only; `CliCheck.unchecked_outputs` lists outputs that were not
          compared. Without it, caches start empty whatever the bundle contains.

        Args:
            archive: folder, `.tar`, `.tar.gz` or `.tgz`; the command reads no other suffix.
            bundle: npz file with inputs and expected outputs.
            options: how to run and compare; None for the defaults of a language model.

        Raises:
            EngineLoadError: tract refused the archive.
            EngineRunError: tract failed to run it.
            EngineCrashError: the process died.
            EngineTimeoutError: the command did not finish in time.
            OptionError: tract would misread the bundle.
        """
        turns = read_turns(bundle)
        command = self._check_command(archive, bundle, options or CommandOptions())
        run = self._execute(command)
        errors, results = _errors(run.stderr), _results(run.stderr)
        compared = "Checking output" in errors or "Missing reference output" in errors
        if run.returncode and not compared:
            self._fail(run)
        _refuse_unchecked_turns(bundle, turns, run.stderr)
        checked = sum("Checked output" in line for line in results)
        if not checked and not run.returncode:
            errors = f"{bundle} holds none of the model's outputs: nothing was compared."
        return CliCheck(
            passed=run.returncode == 0 and checked > 0,
            command=shlex.join(command),
            output=_tail("\n".join([*results, *errors.splitlines()])),
            checked_outputs=checked,
            unchecked_outputs=tuple(_UNCHECKED.findall(run.stderr)),
        )

    def assert_io_cmd_str(
        self,
        nnef_path: str | Path,
        io_npz_path: str | Path,
        check_tolerance: TractCheckTolerance | ToleranceLimits | str | CommandOptions = TractCheckTolerance.EXACT,
    ) -> str:
        """Return the shell command that compares an archive with a bundle. Nothing is run.

        Args:
            nnef_path: folder, `.tar`, `.tar.gz` or `.tgz`.
            io_npz_path: npz file with inputs and expected outputs.
            check_tolerance: a level, numeric limits, or `CommandOptions` for the command of `check_bundle`.
        """
        options = check_tolerance
        if not isinstance(options, CommandOptions):
            options = options_within(tolerance_of(options), allow_float_casts=True)  # npz has no f16
        return shlex.join(self._check_command(Path(nnef_path), Path(io_npz_path), options))

    def run_bundle(
        self, archive: Path, bundle: Path, options: CommandOptions | None = None, *, steps: bool = False
    ) -> dict[str, Array]:
        """Run an archive on the inputs of a bundle and return its outputs.

        Args:
            archive: as in `check_bundle`.
            bundle: as in `check_bundle`.
            options: as in `check_bundle`; nothing is compared.
            steps: return the value of every node by its name instead. The graph then runs before code generation, because the
                command panics when it saves packed values of the optimized graph.

        Returns:
            Outputs by their name in the graph (`<cache input>_concat` for unfolded caches), with the prefix `turn_N/` if there were
            several turns. f16 values are returned as f32 without loss: tract writes npz files without f16.

        Raises:
            EngineError: as `check_bundle`.
            OptionError: tract would misread the bundle.
        """
        read_turns(bundle)
        with tempfile.TemporaryDirectory(prefix="tract-outputs-") as folder:
            saved = Path(folder) / "outputs.npz"
            save = ["--save-steps" if steps else "--save-outputs-npz", str(saved)]
            run = self._execute(
                [*self._run_command(archive, bundle, options or CommandOptions(), optimise=not steps), *save]
            )
            if run.returncode:
                self._fail(run)
            with np.load(saved) as values:
                return dict(values)

    def operators(self, archive: Path, transforms: Sequence[str] = (), *, llm: bool = False) -> Counter[str]:
        """Count the nodes of the optimized graph by tract's operator name.

        All nodes are counted, including `Source`, `Const` and the nodes of loop bodies, as in the wheel's `operators`.

        Args:
            archive: path of the archive.
            transforms: transforms to apply first, in the syntax of the command.
            llm: apply `--llm` first.
        """
        return Counter(node.operator for node in self.dump(archive, transforms=transforms, llm=llm))

    def dump(self, archive: Path, *, transforms: Sequence[str] = (), llm: bool = False) -> tuple[EngineNode, ...]:
        """List the nodes of the optimized graph; see `Engine.dump`.

        Args:
            archive: path of the archive.
            transforms: transforms to apply first, in the syntax of the command.
            llm: apply `--llm` first.
        """
        # --cost: without it --json lists only the nodes that it has something to say about.
        command = [*self._dump(archive, transforms, llm, optimise=True), "--json", "--cost"]
        return read_nodes(self._succeed(command).stdout)

    def profile(
        self,
        archive: Path,
        sizes: Mapping[str, int],
        *,
        transforms: Sequence[str] = (),
        seconds: float = 5.0,
    ) -> Profile:
        """Measure the time of every node on random inputs; see `Engine.profile`.

        Args:
            archive: path of the archive.
            sizes: value of each symbol.
            transforms: transforms to apply first, in the syntax of the command.
            seconds: duration; the last run is completed.
        """
        bound = [word for symbol, size in sizes.items() for word in ("--set", f"{symbol}={size}")]
        limits = ["--max-time", str(round(seconds * 1000))]
        command = [*self._dump(archive, transforms, False, optimise=True), "--json", "--cost", "--profile", "-R"]
        return read_profile(self._succeed([*command, *bound, *limits]).stdout)

    def llm_bench(self, archive: Path, *, warmup_runs: int = 1, seconds: float = 5.0) -> LlmBench:
        """Run `tract ARCHIVE --llm -O llm-bench`.

        tract 0.23.9 ignores `--pp` and `--tg` here: it measures a prompt of 512 tokens repeatedly for `seconds`, and 128 decode
        steps once.

        Args:
            archive: a causal language model; `--llm` makes its caches engine states.
            warmup_runs: runs of each of the two before measuring.
            seconds: duration of the prompt measurement; the last run is completed.

        Raises:
            EngineError: as `check_bundle`; the command printed no figures.
        """
        options = CommandOptions(unfold_kv_cache=False)
        self._refuse_wrong_forms(archive, options)
        command = [str(self.binary), str(Path(archive).absolute()), *options.model_flags(), *self._run_flags(True)]
        limits = ["--warmup-loops", str(warmup_runs), "--max-time", str(round(seconds * 1000))]
        with tempfile.TemporaryDirectory(prefix="tract-bench-") as folder:
            bench = [*command, "--readings", "--emit-jsonl", "llm-bench", *limits]
            run = self._succeed(bench, folder=Path(folder))  # --readings writes a file where it runs
            return read_llm_bench(run.stdout, (Path(folder) / "readings.out").read_text(encoding="utf-8"))

    def dump_command(
        self, archive: Path, *, transforms: Sequence[str] = (), llm: bool = False, optimise: bool = True
    ) -> str:
        """Return a shell command that prints the graph as tract sees it.

        Args:
            archive: path of the archive.
            transforms: transforms to apply first, in the syntax of the command.
            llm: apply `--llm` first.
            optimise: print the optimized graph.
        """
        return shlex.join(self._dump(archive, transforms, llm, optimise))

    def convert(self, model: Path, archive: Path, *, registries: Sequence[str]) -> None:
        """Convert a model with tract to a gzipped NNEF archive.

        Args:
            model: an `.onnx` file or an NNEF archive.
            archive: path to write.
            registries: operator registries that tract enables.

        Raises:
            EngineLoadError: tract cannot read the model, or has no NNEF form for it.
            EngineCrashError: the process died.
            EngineTimeoutError: the command did not finish in time.
        """
        options = CommandOptions(llm=False, registries=registries)
        read = [str(self.binary), str(Path(model).absolute()), *options.model_flags()]
        self._succeed([*read, "dump", "--nnef", str(Path(archive).absolute())])

    # --- command lines ---

    def _dump(self, archive: Path, transforms: Sequence[str], llm: bool, optimise: bool) -> list[str]:
        options = CommandOptions(llm=llm, unfold_kv_cache=False, transforms=transforms)
        self._refuse_wrong_forms(archive, options)
        start = [str(self.binary), str(Path(archive).absolute()), *options.model_flags()]
        return [*start, *self._run_flags(optimise), "dump"]

    def _run_flags(self, optimise: bool) -> list[str]:
        """Flags that say what computes: optimised code on the CPU, a device, or the graph as it was read; on how many threads."""
        # One is the default, which a command without the feature has as well.
        threads = ["--threads", str(self.threads)] if self.threads > 1 else []
        return [*threads, *([f"--{self.device}"] if self.device != CPU else ["-O"] if optimise else [])]

    def _refuse_wrong_forms(self, archive: Path, options: CommandOptions) -> None:
        """Refuse an archive whose results on the device would be wrong."""
        detection = [DETECT_ALL] if options.llm else []
        refuse_wrong_forms(Path(archive), self.device, self.version, [*detection, *options.transforms])

    def _run_command(self, archive: Path, bundle: Path, options: CommandOptions, *, optimise: bool) -> list[str]:
        self._refuse_wrong_forms(archive, options)
        start = [str(self.binary), str(Path(archive).absolute()), *options.model_flags()]
        inputs = ["--input-from-npz", str(Path(bundle).absolute())]
        return [*start, *self._run_flags(optimise), "run", *inputs, *options.run_flags()]

    def _check_command(self, archive: Path, bundle: Path, options: CommandOptions) -> list[str]:
        expected = ["--assert-output-bundle", str(Path(bundle).absolute())]
        return [*self._run_command(archive, bundle, options, optimise=True), *expected, *options.judge_flags()]

    # --- running ---

    def _succeed(self, command: Sequence[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        run = self._execute(command, folder)
        if run.returncode:
            self._fail(run)
        return run

    def _execute(self, command: Sequence[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self.timeout_seconds,
                cwd=folder,
                env={**os.environ, "TRACT_LOG": _LOG_FILTER, "RUST_LOG_STYLE": "never", "RUST_BACKTRACE": "0"},
            )
        except subprocess.TimeoutExpired:
            message = f"tract did not finish within {self.timeout_seconds:g} s and was stopped: {shlex.join(command)}"
            raise EngineTimeoutError(message, "Raise timeout_seconds, or use a smaller input.") from None
        except OSError as error:
            raise EngineError(f"{command[0]} does not start: {error}.") from error

    def _fail(self, run: subprocess.CompletedProcess[str]) -> NoReturn:
        """Raise what a command's exit says about the engine."""
        again = f"To see it again: {shlex.join(run.args)}"
        subject = Path(run.args[1]).name
        if run.returncode < 0 or run.returncode == _RUST_PANIC_EXIT_CODE:
            cause = "panic" if run.returncode > 0 else signal.Signals(-run.returncode).name
            raise EngineCrashError(f"{subject}: tract died ({cause}): {last_words(run.stderr) or 'no message'}.", again)
        if run.returncode == _USAGE_EXIT_CODE:
            refusal = next(iter(run.stderr.strip().splitlines()), "no message")
            raise EngineError(f"tract {self.version} does not know its command line: {refusal}.", again)
        reason = condense_error(_errors(run.stderr))
        if _NO_THREADS in run.stderr:
            raise EngineError(
                f"{self.binary} was built without threads, and {self.threads} are wanted.",
                f"Build it with them: {shlex.join(cargo_command(self.version))} --force",
            )
        if self.device != CPU and _NO_DEVICE.search(reason):
            raise device_missing(f"the command tract {self.version}", self.device, reason)
        # "Model ready" is logged once loading, transforms and code generation are done.
        kind = EngineRunError if "Model ready" in run.stderr else EngineLoadError
        refused = "run" if kind is EngineRunError else "load"
        raise kind(f"{subject}: tract refused the {refused}: {reason}.", again)


def _find(binary: Path | None) -> tuple[Path, str]:
    """Return the executable to use and its version."""
    named = binary or os.environ.get("TRACT_BINARY")
    if named:
        path = Path(named).absolute()
        version = probe_version(path)
        if version is None:
            origin = "the tract command given" if binary else "$TRACT_BINARY"
            raise EngineMissingError(f"{origin}, {path}, is not an executable tract.", _INSTALL_HINT)
        return path, version
    for path in (*binaries_on_path(), installed_path(TRACT_CLI_VERSION)):
        version = probe_version(path)
        if version is not None:
            if version != TRACT_CLI_VERSION:
                log.warning("%s is tract %s; this project is tested with %s", path, version, TRACT_CLI_VERSION)
            return path, version
    raise EngineMissingError("the tract command is not installed.", _INSTALL_HINT)


# --- log --------------------------------------------------------------------------------------


def _log_messages(stderr: str) -> Iterator[tuple[str, str]]:
    """Yield (level, message) of every log record; a record may span lines."""
    level, lines = "", list[str]()
    for line in stderr.splitlines():
        match = _LOG_LINE.match(line)
        if match is None:
            lines.append(line)
            continue
        yield level, "\n".join(lines)
        level, lines = match[1], [match[2]]
    yield level, "\n".join(lines)


def _errors(stderr: str) -> str:
    return "\n".join(message for level, message in _log_messages(stderr) if level == "ERROR")


def _results(stderr: str) -> list[str]:
    return [m for level, m in _log_messages(stderr) if level == "INFO" and m.startswith(_RESULTS)]


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-_OUTPUT_TAIL_LINES:])


# --- bundles ----------------------------------------------------------------------------------


def _refuse_unchecked_turns(bundle: Path, turns: Mapping[str, int], stderr: str) -> None:
    """Refuse a verdict about outputs given for several turns: it compares the last turn with the first."""
    inputs = set(_FED_INPUT.findall(stderr))
    outputs = sorted(name for name, count in turns.items() if count > 1 and name not in inputs)
    if inputs and outputs:
        problem = f"{bundle}: several turns of {', '.join(outputs)}, which are not inputs; tract compares the last"
        raise OptionError(f"{problem} turn with the first value.", "Write one bundle a turn with write_bundle.")
