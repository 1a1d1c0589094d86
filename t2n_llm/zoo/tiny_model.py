"""A tiny random checkpoint of an architecture, and whether transformers itself can run it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvcache.compat import CACHE_NAMES
from t2n_llm.compat import from_config
from t2n_llm.tasks.heads.image_size import image_size_of
from t2n_llm.tasks.heads.inputs import reading_of
from t2n_llm.tasks.heads.table import HEADS, Head, kind_of
from t2n_llm.tasks.models import mapping_of
from t2n_llm.tasks.multimodal.check import plan_prompts, run_multimodal_reference
from t2n_llm.tasks.multimodal.families import family_of
from t2n_llm.tasks.names import TEXT_GENERATION, TEXT_TO_AUDIO
from t2n_llm.zoo.configs import tiny_config
from t2n_llm.zoo.shrinking import ELSEWHERE, GENTLE, TEMPERED, Rules
from t2n_llm.zoo.tasks import Way, architectures, zoo_task
from t2n_llm.zoo.tiny_inputs import source_inputs, tiny_image_size

_SPREAD = 0.1
_PROMPT = 12
_CLIPPED_AT = 2.0
_FIRST_TOKEN = 3
_OTHER_SEED = 1000
_VOCODER, _VOCODER_CLASS = "speecht5_hifigan", "SpeechT5HifiGan"
_CODEC, _CODEC_CLASS = "pocket_tts_audio_tokenizer", "PocketTTSAudioTokenizerModel"
_SURE = 3e-5  # of the largest value: what f32 may be off by in a model that is worth comparing


def build_tiny_model(architecture: str, seed: int = 0, task: str = TEXT_GENERATION) -> Any:
    """Return a random model in f32, on the CPU, whose results are worth comparing.

    Args:
        architecture: a model type of transformers.
        seed: of the weights.
        task: what the model is for.

    Raises:
        TinyConfigError: there is no tiny config.
        Exception: whatever transformers raises when it builds the model.
    """
    if zoo_task(task).way in (Way.FORWARD, Way.PROMPTS):
        return _first_that_runs(architecture, seed, task)
    row = zoo_task(task)
    # Speech models are of two auto classes.
    class_name = architectures(task)[architecture] if row.way is Way.SPEAK else row.auto_class
    return _settled(tiny_config(architecture, task), class_name, seed)


def _first_that_runs(architecture: str, seed: int, task: str) -> Any:
    """Return the smallest model that runs: the sizes of a family may be tied to each other in ways that no field says."""
    refusals: list[Exception] = []
    for rules in (ELSEWHERE, GENTLE):
        try:
            model = _made_by(rules, architecture, seed, task)
            run_in_transformers(model, task, 0)
        except Exception as error:  # whatever the model's own code raises
            refusals.append(error)
            continue
        return model if rules is ELSEWHERE or task not in HEADS else _surest(model, architecture, seed, task)
    raise refusals[-1]


def _surest(model: Any, architecture: str, seed: int, task: str) -> Any:
    """Return a model, or the first of a few others of its sizes whose f32 is what float64 says.

    Wide models with large weights lose digits, and a detector may take the best of scores that are as good as equal.
    """
    found = [(_rounding(model, task), model)]
    for rules, other in ((TEMPERED, seed), (GENTLE, seed + _OTHER_SEED), (TEMPERED, seed + _OTHER_SEED)):
        if found[-1][0] <= _SURE:
            break
        model = _made_by(rules, architecture, other, task)
        found.append((_rounding(model, task), model))
    return min(found, key=lambda each: each[0])[1]


def _made_by(rules: Rules, architecture: str, seed: int, task: str) -> Any:
    config = tiny_config(architecture, task, rules)
    if task not in HEADS:
        return _settled(config, zoo_task(task).auto_class, seed)
    config.architectures = [architectures(task)[architecture]]
    return _settled(config, kind_of(HEADS[task], config).auto_class, seed)


def _rounding(model: Any, task: str) -> float:
    """Return how far a model's f32 results are from its own in float64, of the largest value; 0 where it has no float64."""
    reading = reading_of(HEADS[task], model, image_size_of(model.config, None))
    given = {name: torch.from_numpy(array) for name, array in reading.random(reading.others[0]).items()}
    exact = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in given.items()}
    try:
        with torch.no_grad():
            rounded, wanted = model(**given), copy.deepcopy(model).double()(**exact)
    except Exception:  # whatever PyTorch cannot do in float64, or for one alone
        return 0.0
    read = HEADS[task].read_of(wanted)
    return max(float((rounded[name] - wanted[name]).abs().max() / wanted[name].abs().max()) for name in read)


def _settled(config: Any, class_name: str, seed: int) -> Any:
    torch.manual_seed(seed)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = _FIRST_TOKEN  # as every checkpoint has it, also where the class does not
    model = from_config(class_name, config, dtype=torch.float32, attn_implementation="eager")
    _unsettle(model)
    _pad_as_loaded(model)
    _choose_experts(model)
    _mask_some_layers(model)
    _clip(model)
    _begin_somewhere(model)
    return model.eval()


def _unsettle(model: Any) -> None:
    """Move what starts out neutral (norm scales of 1, biases and gates of 0), so that a forgotten one shows.

    The row of the padding token in an embedding is 0 as well: norms of it and routers after them would only see ties.
    """
    stored = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    with torch.no_grad():
        for tensor in [*model.parameters(), *(buffer for buffer in model.buffers() if id(buffer) in stored)]:
            if tensor.is_floating_point() and tensor.numel():
                tensor.add_(torch.randn_like(tensor) * _SPREAD * _neutral(tensor))


def _pad_as_loaded(model: Any) -> None:
    """Set the padding token's row of Funnel's embedding to 0: transformers does so to every checkpoint that it loads."""
    for module in model.modules():
        if type(module).__name__ == "FunnelEmbeddings":
            with torch.no_grad():
                module.word_embeddings.weight[module.word_embeddings.padding_idx].zero_()


def _choose_experts(model: Any) -> None:
    """Fill tables that say which experts a token goes to (DeepSeek-V4's first layers), each of them another one."""
    for module in model.modules():
        table = getattr(module, "tid2eid", None)
        if isinstance(table, torch.Tensor):
            table.copy_(torch.rand(table.shape[0], module.num_experts).argsort(dim=-1)[:, : table.shape[1]])


def _mask_some_layers(model: Any) -> None:
    """Let every other layer mask, and none of them draw whether it does (EoMT): as in trained ones, shares are 0 or 1."""
    shares = getattr(model, "attn_mask_probs", None)
    if isinstance(shares, torch.Tensor):
        shares.copy_(torch.arange(len(shares)) % 2)


def _clip(model: Any) -> None:
    """Let linears clip (Gemma 4's audio encoder): as in trained models, their limits are numbers."""
    for buffer in model.buffers():
        if buffer.is_floating_point() and buffer.numel() == 1 and bool(buffer.isinf()):
            buffer.copy_(buffer.sign() * _CLIPPED_AT)


def _begin_somewhere(model: Any) -> None:
    """Say how generation begins where a model's defaults do not: with which token, or with noise."""
    generation = getattr(model, "generation_config", None)
    if model.config.is_encoder_decoder and generation is not None and generation.decoder_start_token_id is None:
        generation.decoder_start_token_id = _FIRST_TOKEN
    # Without noise, all speech of a text is the same; checkpoints have it.
    if generation is not None and _makes_latents(model):
        generation.do_sample, generation.temperature = True, 0.7


def _makes_latents(model: Any) -> bool:
    return hasattr(model.config, "flow_head_config")


def _neutral(tensor: torch.Tensor) -> torch.Tensor:
    """Return 1 where values are to be moved, 0 elsewhere; it broadcasts to the tensor."""
    if tensor.ndim <= 1 or bool((tensor == tensor.flatten()[0]).all()):
        return torch.ones(())
    return (tensor == 0).all(-1, keepdim=True).to(tensor.dtype)


def save_tiny_model(model: Any, folder: Path, task: str = TEXT_GENERATION, architecture: str | None = None) -> None:
    """Write config and safetensors; no tokenizer.

    Some classes keep only a part of their config, of a kind that is not registered for the task; checkpoints of those families
    have the whole one.

    Args:
        model: as `build_tiny_model` makes it.
        folder: is made.
        task: what the model is for.
        architecture: what it was built for; None takes the first one with that class.
    """
    model.save_pretrained(folder)
    known = architectures(task)
    if model.config.model_type not in known and type(model).__name__ in known.values():
        kind = architecture or next(kind for kind, name in known.items() if name == type(model).__name__)
        tiny_config(kind, task).save_pretrained(folder)


def save_tiny_vocoder(model: Any, folder: Path, task: str, seed: int = 0) -> bool:
    """Write a vocoder for a model that makes spectrograms or a codec's latents.

    Args:
        model: as `build_tiny_model` makes it.
        folder: is made.
        task: what the model is for.
        seed: of the weights.

    Returns:
        Whether the model is one.
    """
    if task != TEXT_TO_AUDIO:
        return False
    if _makes_latents(model):
        _settled(tiny_config(_CODEC, task), _CODEC_CLASS, seed).save_pretrained(folder)
        return True
    if model.config.model_type not in mapping_of("FOR_TEXT_TO_SPECTROGRAM"):
        return False
    config = tiny_config(_VOCODER, task)
    config.model_in_dim = model.config.num_mel_bins
    _settled(config, _VOCODER_CLASS, seed).save_pretrained(folder)
    return True


def run_in_transformers(model: Any, task: str, steps: int) -> str:
    """Run a model as its task does.

    Args:
        model: of that task.
        task: decides how.
        steps: tokens to generate, where it generates.

    Returns:
        The class of the states that it kept, or "" when it kept none.

    Raises:
        Exception: whatever transformers raises.
    """
    if task == TEXT_GENERATION:
        return decode_in_transformers(model, steps)
    if zoo_task(task).way is Way.GENERATE:
        return _generate(model, source_inputs(model), steps)
    if zoo_task(task).way is Way.PROMPTS:
        _answer_prompts(model, task)
        return ""
    if zoo_task(task).way is Way.SPEAK:
        return ""
    _run_once(model, HEADS[task])
    return ""


def _run_once(model: Any, head: Head) -> None:
    reading = reading_of(head, model, image_size_of(model.config, None))
    refusals: list[Exception] = []
    for way in (reading, replace(reading, reads_batches=False)):
        given = {name: torch.from_numpy(array) for name, array in way.random(way.others[-1]).items()}
        try:
            with torch.no_grad():
                result = model(**given, return_dict=True)
        except (
            Exception
        ) as error:  # whatever the model's own code raises; a classifier without padding token takes one text
            refusals.append(error)
            continue
        found = [value for value in result.values() if isinstance(value, torch.Tensor)]
        if not all(bool(value.isfinite().all()) for value in found):
            raise ArithmeticError("transformers' own results are not finite")
        return
    raise refusals[0]


def _answer_prompts(model: Any, task: str) -> None:
    family = family_of(model.config, tiny_image_size(model.config, task), task)
    answers = run_multimodal_reference(model, family, plan_prompts(family))
    if not all(bool(np.isfinite(row).all()) for answer in answers for row in answer.rows):
        raise ArithmeticError("transformers' own logits are not finite")


def decode_in_transformers(model: Any, steps: int) -> str:
    """Generate greedily with transformers' own cache.

    Args:
        model: a causal LM.
        steps: tokens to generate.

    Returns:
        The class of the states that it kept, or "" when it kept none.

    Raises:
        Exception: whatever transformers raises.
    """
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(3, 3 + _PROMPT).remainder(vocabulary)[None]
    return _generate(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, steps)


def _generate(model: Any, inputs: Mapping[str, torch.Tensor], steps: int) -> str:
    with torch.no_grad():
        answer = model.generate(
            **inputs,
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
            use_cache=True,
            return_dict_in_generate=True,
            output_logits=True,
        )
    if not all(bool(row.isfinite().all()) for row in answer.logits):
        raise ArithmeticError("transformers' own logits are not finite")
    return _states_of(answer)


def _states_of(answer: Any) -> str:
    for name in (*CACHE_NAMES, "state", "rnn_state", "mems", "past_buckets_states"):
        state = vars(answer).get(name)
        if state is not None:
            return type(state).__name__
    return ""
