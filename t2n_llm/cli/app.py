"""The command `t2n-llm`: parses, calls, prints. Heavy imports happen inside the commands, so that `--help` is quick."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from generic_export.errors import OptionError
from t2n_llm.cli.bench import bench, profile
from t2n_llm.cli.console import OutputMode, Sink
from t2n_llm.cli.diagnose import coverage, diagnose
from t2n_llm.cli.edge import COMMAND, Interrupted, UnforeseenError, advice_on, interruptible
from t2n_llm.cli.inspect import inspect
from t2n_llm.cli.remodel import remodel
from t2n_llm.cli.tasks import export_task, validate_task
from t2n_llm.cli.zoo import zoo
from t2n_llm.tasks.names import TEXT_GENERATION, recorded_task

if TYPE_CHECKING:
    from t2n_llm.check.causal_lm import ValidationReport

EXIT_DISAGREES = 1
EXIT_BAD_INPUT = 2
EXIT_BUG = 3
_JSON_TO_FILE = ("coverage", "diagnose")  # their --json takes a file

app = typer.Typer(
    help="Bring Hugging Face causal language models to the tract inference engine.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

_JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
_QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but warnings and errors.")]
_EngineOption = Annotated[
    str,
    typer.Option(
        help="wheel: tract from pip, embedded. cli: the tract command. auto: the first of them that is there."
    ),
]
_AtolOption = Annotated[
    float | None, typer.Option(min=0.0, help="Largest error of a logit, instead of the type's own.")
]
_RtolOption = Annotated[float | None, typer.Option(min=0.0, help="The same as a share of the largest logit.")]
_TractOption = Annotated[
    Path | None, typer.Option("--tract", help="The tract command to check with (implies --engine cli).")
]
_RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub repository.")]
_TokenOption = Annotated[
    str | None, typer.Option(help="Hub access token; by default the one of `hf auth login` or HF_TOKEN.")
]
_TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")]
_LowMemoryOption = Annotated[
    bool, typer.Option("--low-memory", help="Run PyTorch in a process that ends before the engine starts.")
]
_AdapterOption = Annotated[
    str | None, typer.Option("--adapter", metavar="PATH", help="LoRA or DoRA to merge: hub id or local folder.")
]
_DeviceMapOption = Annotated[
    str,
    typer.Option(help="Weights of the PyTorch reference: auto (on disk what does not fit), cpu, disk or cuda."),
]
_MaxMemoryOption = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Most memory for those weights: 8GB, or cpu=8GB,0=20GB by device.")
]
_StepsOption = Annotated[int, typer.Option(min=1, help="Tokens decoded by the check.")]


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"t2n-llm {version('t2n-llm')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the Python traceback of an error.")] = False,
) -> None:
    del version
    _settings.debug = debug


@app.command()
def export(
    source: Annotated[str, typer.Argument(help="Hub id (meta-llama/Llama-3.1-8B), local folder or .gguf file.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Folder to make; by default named after the model."),
    ] = None,
    task: Annotated[
        str,
        typer.Option(
            help="text-generation, feature-extraction (last hidden states), sequence-classification (logits), "
            "image-text-to-text or audio-text-to-text (encoder and decoder)."
        ),
    ] = TEXT_GENERATION,
    dtype: Annotated[str, typer.Option(help="f16 or f32: weights, activations and caches.")] = "f16",
    compress: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:ALGORITHM]",
            help="Recipe: q4_0, q4_0+embeddings, q4_0-mixed (with --target-size), f16, f32. "
            "Algorithms: search (default), min_max; with calibration imatrix, gptq, awq, best.",
        ),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Recipe in YAML (docs/quantization.md), instead of --compress.")
    ] = None,
    target_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What all weights may take, such as 900MB, for q4_0-mixed.")
    ] = None,
    quantizers: Annotated[
        str | None, typer.Option(metavar="MODULE:DICT", help="A dict of your own algorithms, by name.")
    ] = None,
    calibration: Annotated[
        str, typer.Option(help="Text for imatrix, gptq, awq and best: a file, auto (the model writes it) or builtin.")
    ] = "builtin",
    imatrix: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Statistics for imatrix, ours or llama.cpp's, instead of a calibration."),
    ] = None,
    save_imatrix: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep the statistics of this calibration (*.imatrix.safetensors)."),
    ] = None,
    archive: Annotated[str, typer.Option(help="tar, tgz or dir.")] = "tar",
    check: Annotated[bool, typer.Option("--check/--no-check", help="Validate token by token in tract.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export of that name.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be written, how large and how long; write nothing.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an export that was killed or interrupted.")
    ] = False,
    revision: _RevisionOption = None,
    token: _TokenOption = None,
    trust_remote_code: _TrustOption = False,
    num_logits_to_keep: Annotated[
        int,
        typer.Option(
            min=0, help="Positions whose logits are given, from the end. 0: all, as speculative decoding wants."
        ),
    ] = 1,
    batch: Annotated[bool, typer.Option("--batch", help="Make the batch a symbol B instead of 1.")] = False,
    f32_linear_accumulation: Annotated[
        bool, typer.Option("--f32-linear-accumulation", help="f16 matrix products accumulate in f32.")
    ] = False,
    f32_attention: Annotated[bool, typer.Option("--f32-attention", help="Compute attention in f32.")] = False,
    f32_norm: Annotated[
        bool, typer.Option("--f32-norm", help="Compute norms in f32, scale and shift included.")
    ] = False,
    stateful: Annotated[
        bool, typer.Option("--stateful", help="The engine keeps the cache from the start: input_ids is the only input.")
    ] = False,
    kv_cache: Annotated[
        str | None,
        typer.Option("--kv-cache", metavar="TYPE", help="int8 or int4: as --stateful, keys and values quantised."),
    ] = None,
    window_cache: Annotated[
        bool, typer.Option("--window-cache", help="Sliding layers keep their window only, not all positions.")
    ] = False,
    keep_f32: Annotated[
        list[str] | None,
        typer.Option("--keep-f32", metavar="PATTERN", help="Keep these parameters in f32 (shell pattern, repeatable)."),
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(help="Height and width of images in pixels, for vision models that take any size.")
    ] = None,
    decode_steps: _StepsOption = 64,
    low_memory: _LowMemoryOption = False,
    adapter: _AdapterOption = None,
    adapter_only: Annotated[
        bool, typer.Option("--adapter-only", help="Write just the adapter's tensors; they share a base archive.")
    ] = False,
    device_map: _DeviceMapOption = "auto",
    max_memory: _MaxMemoryOption = None,
    tokenizer: Annotated[
        bool, typer.Option("--tokenizer/--no-tokenizer", help="Require a tokenizer in the source.")
    ] = True,
    engine: _EngineOption = "wheel",
    tract: _TractOption = None,
    as_json: _JsonOption = False,
    quiet: _QuietOption = False,
) -> None:
    """Export a model, and prove that tract says what PyTorch says.

    Exit code 0: exported (and checked). 1: tract disagrees; the archive is kept as DIR.failed. 2: bad input. 3: a bug.
    """
    with _sink(as_json, quiet) as sink:
        _quiet_libraries(sink.mode)
        if adapter_only:
            from t2n_llm.export.adapter_only import export_adapter

            if adapter is None:
                raise OptionError("--adapter-only is given without an adapter.", "Name it with --adapter.")
            sink.adapted(
                export_adapter(
                    source,
                    adapter,
                    output,
                    dtype=dtype,
                    force=force,
                    revision=revision,
                    token=token,
                    trust_remote_code=trust_remote_code,
                )
            )
            return
        from t2n_llm.export.options import parse_options
        from t2n_llm.tasks.text_generation import export_llm, plan_llm_export

        origin: dict[str, Any] = {
            "revision": revision,
            "token": token,
            "trust_remote_code": trust_remote_code,
            "reporter": sink,
        }
        choices: dict[str, Any] = {
            "dtype": dtype,
            "compress": compress,
            "recipe": recipe,
            "target_size": target_size,
            "quantizers": quantizers,
            "calibration": calibration,
            "imatrix": imatrix,
            "save_imatrix": save_imatrix,
            "check": check,
            "archive": archive,
            "force": force,
            "resume": resume,
            "num_logits_to_keep": num_logits_to_keep,
            "batch": batch,
            "f32_linear_accumulation": f32_linear_accumulation,
            "f32_attention": f32_attention,
            "f32_norm": f32_norm,
            "stateful": stateful,
            "kv_cache": kv_cache,
            "window_cache": window_cache,
            "keep_f32": keep_f32 or (),
            "low_memory": low_memory,
            "device_map": device_map,
            "max_memory": max_memory,
            "decode_steps": decode_steps,
            "require_tokenizer": tokenizer,
            "engine": engine,
            "tract_binary": tract,
        }
        if task != TEXT_GENERATION:
            export_task(
                sink,
                source,
                output,
                adapter,
                dry_run,
                parse_options(task=task, image_size=image_size, **choices),
                origin,
            )
            return
        origin["adapter"] = adapter
        if dry_run:
            sink.planned(plan_llm_export(source, output, options=parse_options(**choices), **origin))
            return
        result = export_llm(source, output, **choices, **origin)
    sink.exported(result)


@app.command()
def validate(
    folder: Annotated[Path, typer.Argument(help="Folder made by `t2n-llm export`.")],
    reference: Annotated[
        str | None, typer.Option(help="Hub id or folder of the original; by default the hub id that was exported.")
    ] = None,
    revision: _RevisionOption = None,
    token: _TokenOption = None,
    trust_remote_code: _TrustOption = False,
    decode_steps: _StepsOption = 64,
    low_memory: _LowMemoryOption = False,
    adapter: _AdapterOption = None,
    device_map: _DeviceMapOption = "auto",
    max_memory: _MaxMemoryOption = None,
    atol: _AtolOption = None,
    rtol: _RtolOption = None,
    engine: _EngineOption = "wheel",
    tract: _TractOption = None,
    as_json: _JsonOption = False,
    quiet: _QuietOption = False,
) -> None:
    """Compare an export with PyTorch: prefill, chunked prefill, decode with the cache fed back, greedy generation.

    Exit code 0: they agree within the element type's tolerance. 1: they differ. 2: bad input. 3: a bug.
    """
    with _sink(as_json, quiet) as sink:
        _quiet_libraries(sink.mode)
        from t2n_llm.export.folder import read_manifest
        from t2n_llm.export.revalidate import ValidateOptions, validate_folder
        from t2n_llm.weights.placement import Placement

        options = ValidateOptions(
            revision=revision,
            token=token,
            trust_remote_code=trust_remote_code,
            decode_steps=decode_steps,
            low_memory=low_memory,
            engine=engine,
            tract_binary=tract,
            adapter=adapter,
            placement=Placement.parse(device_map, max_memory),
            atol=atol,
            rtol=rtol,
        )
        exported = recorded_task(read_manifest(folder))
        if exported != TEXT_GENERATION:
            if not validate_task(sink, exported, folder, reference, options):
                raise typer.Exit(EXIT_DISAGREES)
            return
        report = validate_folder(folder, reference, options=options, reporter=sink)
        if not (report.passed or as_json):
            from t2n_llm.check.causal_lm import FailedValidationError

            hint = "Is the reference the model that was exported? Then export it again."
            raise FailedValidationError(str(folder), hint, report)
    sink.validated(report)
    if not report.passed:
        raise typer.Exit(EXIT_DISAGREES)


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="Folder made by `t2n-llm export`, or the archive in it.")],
    as_json: _JsonOption = False,
    quiet: _QuietOption = False,
) -> None:
    """Read an export again and compare every tensor with the SHA-256 recorded when it was written.

    Exit code 0: as written. 1: damaged; each bad, missing or extra tensor is named. 2: bad input. 3: a bug.
    """
    with _sink(as_json, quiet) as sink:
        from t2n_llm.export.verify import verify_export

        report = verify_export(path, sink.progress)
    sink.verified(report)
    if not report.passed:
        raise typer.Exit(EXIT_DISAGREES)


@app.command(name="quantize-report")
def quantize_report_command(
    folder: Annotated[Path, typer.Argument(help="Folder made by `t2n-llm export`, compressed or not.")],
    reference: Annotated[
        str | None,
        typer.Option(
            help="The original (hub id or folder, run in PyTorch), or another export of it (run in tract). "
            "By default the hub id that was exported."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text to measure on; by default one that comes with the package."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="About how many tokens to score.")] = 2048,
    window: Annotated[int, typer.Option(min=2, help="Tokens in one piece of the text.")] = 256,
    plot: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw the error by layer (needs t2n-llm[plot]).")
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option(min=0.0, help="Exit with 1 when the mean KL divergence is above this.")
    ] = None,
    revision: _RevisionOption = None,
    token: _TokenOption = None,
    trust_remote_code: _TrustOption = False,
    device_map: _DeviceMapOption = "auto",
    max_memory: _MaxMemoryOption = None,
    engine: _EngineOption = "wheel",
    tract: _TractOption = None,
    as_json: _JsonOption = False,
    quiet: _QuietOption = False,
) -> None:
    """Say what compression costs: the error of each tensor, and perplexity and divergence through the engine.

    Exit code 0: measured. 1: the divergence is above --max-kl. 2: bad input. 3: a bug.
    """
    with _sink(as_json, quiet) as sink:
        _quiet_libraries(sink.mode)
        from t2n_llm.cli.report_plot import plot_report, require_plotting
        from t2n_llm.measure.quantize_report import quantize_report

        if plot is not None:
            require_plotting(plot)
        report = quantize_report(
            folder,
            reference,
            text=text,
            tokens=tokens,
            window=window,
            revision=revision,
            token=token,
            trust_remote_code=trust_remote_code,
            device_map=device_map,
            max_memory=max_memory,
            engine=engine,
            tract_binary=tract,
            reporter=sink,
        )
        if plot is not None:
            plot_report(report, plot)
    sink.quality(report, max_kl)
    if max_kl is not None and not report.quality.mean_kl <= max_kl:
        raise typer.Exit(EXIT_DISAGREES)


@app.command()
def generate(
    archive: Annotated[Path, typer.Argument(help="Folder made by `t2n-llm export`, or the archive in it.")],
    prompt: Annotated[str, typer.Argument(help="What to continue, or to answer.")],
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Most tokens to generate.")
    ] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the most likely token; higher: more varied.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens of this total probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Put the prompt in the model's chat template, if any.")
    ] = True,
    device: Annotated[str, typer.Option(help="cpu, cuda or metal, where tract has it.")] = "cpu",
    as_json: _JsonOption = False,
) -> None:
    """Generate text in tract, streamed, with the cache kept by the engine."""
    with _sink(as_json, quiet=False) as sink:
        _quiet_libraries(sink.mode)
        from t2n_llm.measure.generate import ExportedModel, Sampling

        sampling = Sampling(temperature, top_p, seed)
        model = ExportedModel.open(archive, device=device)
        pieces: list[str] = []
        for piece in model.generate(prompt, max_new_tokens=max_new_tokens, sampling=sampling, chat=chat):
            pieces.append(piece)
            if not as_json:
                sink.text(piece)
    sink.generated({"prompt": prompt, "text": "".join(pieces)})


class _Settings:
    """What the root command was told, for `main`."""

    debug = False
    mode = OutputMode.HUMAN


_settings = _Settings()


def _sink(as_json: bool, quiet: bool) -> Sink:
    _settings.mode = OutputMode.JSON if as_json else OutputMode.QUIET if quiet else OutputMode.HUMAN
    return Sink(_settings.mode)


def _quiet_libraries(mode: OutputMode) -> None:
    """Keep the progress bars and notices of other libraries out of our output; downloads may show theirs to people."""
    import warnings

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=FutureWarning)
    from huggingface_hub.utils.tqdm import enable_progress_bars
    from transformers.utils import logging

    logging.disable_progress_bar()  # the hub's as well
    if mode is OutputMode.HUMAN and sys.stderr.isatty() and "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ:
        enable_progress_bars()


# --- the edge: exceptions become one line, a hint and an exit code -----------------------------


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    words = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    _settings.debug, _settings.mode = False, _spoken(words)
    with interruptible():
        try:
            code = app(words, prog_name=COMMAND, standalone_mode=False)
        except (Exception, Interrupted) as error:
            code = _report(error)
    sys.exit(code or 0)


def _spoken(words: list[str]) -> OutputMode:
    """Return how errors are told: as JSON when JSON goes to stdout, which some commands are told by `--json -`."""
    to_stdout = "--json" in words
    if to_stdout and words[0] in _JSON_TO_FILE:
        to_stdout = "-" in words[words.index("--json") + 1 :][:1]
    return OutputMode.JSON if to_stdout or "--json=-" in words else OutputMode.HUMAN


def _report(error: BaseException) -> int:
    """Print an error; return the exit code."""
    if _settings.debug:
        import traceback

        traceback.print_exception(error)
    advice = advice_on(error)
    advice.hint = advice.hint or f"Run {COMMAND} --debug ... to see where this comes from."
    report: ValidationReport | None = getattr(error, "report", None)
    Sink(_settings.mode).error(advice, report)
    if report is not None:
        return EXIT_DISAGREES
    return EXIT_BUG if isinstance(advice, UnforeseenError) else EXIT_BAD_INPUT


for _command in (inspect, profile, bench, coverage, diagnose, remodel):  # each in a file of its own
    app.command()(_command)
app.add_typer(zoo, name="zoo")


if __name__ == "__main__":
    main()
