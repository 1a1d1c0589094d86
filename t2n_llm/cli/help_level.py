"""Which options `--help` shows: those that most users need. `--help-all` shows every option.

In: the parser of all commands. Out: the same with other options hidden, a line that says so, and no types of flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HELP, HELP_ALL = "--help", "--help-all"


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


ADVANCED: Mapping[str, frozenset[str]] = {
    "export": _names(
        "activations allow_nonfinite attention batch cache_dtype decode_steps device_map engine f32_attention "
        "f32_linear_accumulation f32_norm f32_residual fragments frontend image_size imatrix keep_f32 kv_cache low_memory "
        "max_layers max_memory mla num_logits_to_keep prefill_chunk public push quantizers recipe require_tokenizer "
        "save_imatrix stateful threads towers tract_binary weights_in_memory window_cache"
    ),
    "validate": _names(
        "atol decode_steps device_map engine low_memory max_layers max_memory revision rtol threads token tract_binary "
        "trust_remote_code"
    ),
    "generate": _names("beams min_p prefill_chunk prompt_lookup_tokens repetition_penalty template_kwargs"),
    "chat": _names("min_p prefill_chunk repetition_penalty"),
    "bench": _names("engine timeout tract warmup"),
    "diagnose": _names("atol jobs max_layers memory revision rtol strategy timeout token trust_remote_code"),
    "quantize-report": _names(
        "device_map engine max_layers max_memory revision threads token tokens tract_binary trust_remote_code window"
    ),
    "run": _names("expect expected fresh history html markdown max_memory ray_address seed shard update"),
}
"""Options that `--help` leaves out, by command and parameter."""


def wants_everything(words: list[str]) -> bool:
    """Return whether every option is asked for; `--help` takes its place in the words."""
    if HELP_ALL not in words:
        return False
    words[words.index(HELP_ALL)] = HELP
    return True


def set_help_level(command: Any, everything: bool) -> None:
    """Hide the advanced options of a command and of those below it, unless everything is shown.

    Args:
        command: of the command line.
        everything: show every option.
    """
    for parameter in command.params:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    advanced = frozenset() if everything else ADVANCED.get(command.name or "", frozenset())
    hidden = [parameter for parameter in command.params if parameter.name in advanced]
    for parameter in hidden:
        parameter.hidden = True
    if hidden:
        command.epilog = f"{HELP_ALL} shows {len(hidden)} more options."
    for each in getattr(command, "commands", {}).values():
        set_help_level(each, everything)
