"""timm: a small variant for each of its model modules, batch dynamic, height and width where the family takes any.

The table is data: module -> model, size of a picture, whether it takes other sizes, what makes it smaller. NASNet pads by what is
left of heights and widths, and Inception-ResNet rounds them down again and again: the one's export takes nearly three minutes
and the other's load two, unless they are declared multiples of the stride. Windows are declared multiples too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn

from t2n_llm.zoo.suites.case import ModuleCase, pictures

_NONE: Mapping[str, Any] = MappingProxyType({})
_NARROW = MappingProxyType({"embed_dim": 96, "depth": 2, "num_heads": 3})

_ANY, _FIXED = True, False
_MODELS: Mapping[str, tuple[str, int, bool, Mapping[str, Any]]] = {
    "beit": ("beit_base_patch16_224", 224, _FIXED, _NARROW),
    "byoanet": ("eca_botnext26ts_256", 256, _FIXED, _NONE),
    "byobnet": ("mobileone_s1", 96, _ANY, _NONE),
    "cait": ("cait_xxs24_224", 224, _FIXED, {"depth": 2}),
    "coat": ("coat_lite_tiny", 224, _FIXED, _NONE),
    "convit": ("convit_tiny", 224, _FIXED, {"depth": 4, "local_up_to_layer": 2}),
    "convmixer": ("convmixer_768_32", 96, _ANY, _NONE),
    "convnext": ("convnext_atto", 96, _ANY, _NONE),
    "cpubone": ("cpubone_nano", 96, _ANY, _NONE),
    "crossvit": ("crossvit_tiny_240", 240, _FIXED, _NONE),
    "csatv2": ("csatv2", 256, _ANY, _NONE),
    "cspnet": ("cs3darknet_focus_s", 96, _ANY, _NONE),
    "cspnext": ("cspnext_tiny", 96, _ANY, _NONE),
    "davit": ("davit_tiny", 224, _ANY, {"depths": (1, 1, 1, 1)}),
    "deepseek_vit": ("deepseek_vit_412m", 112, _FIXED, {"embed_dim": 64, "depth": 2, "num_heads": 2, "img_size": 112}),
    "deit": ("deit3_small_patch16_224", 224, _ANY, {**_NARROW, "dynamic_img_size": True}),
    "densenet": ("densenet121", 96, _ANY, {"block_config": (2, 2, 2, 2)}),
    "dla": ("dla46x_c", 96, _ANY, _NONE),
    "dpn": ("dpn48b", 96, _ANY, _NONE),
    "edgenext": ("edgenext_xx_small", 128, _ANY, _NONE),
    "efficientformer": ("efficientformer_l1", 224, _FIXED, _NONE),
    "efficientformer_v2": ("efficientformerv2_s0", 224, _FIXED, _NONE),
    "efficientnet": ("efficientnet_b0", 96, _ANY, _NONE),
    "efficientnet of TensorFlow": ("tf_efficientnet_b0", 96, _ANY, _NONE),
    "efficientvim": ("efficientvim_m1", 224, _ANY, _NONE),
    "efficientvit_mit": ("efficientvit_b0", 96, _ANY, _NONE),
    "efficientvit_msra": ("efficientvit_m0", 224, _FIXED, _NONE),
    "eva": ("eva02_tiny_patch14_224", 224, _ANY, {"depth": 2, "dynamic_img_size": True}),
    "fasternet": ("fasternet_t0", 96, _ANY, _NONE),
    "fastvit": ("fastvit_t8", 96, _ANY, _NONE),
    "focalnet": ("focalnet_tiny_srf", 96, _ANY, _NONE),
    "gcvit": ("gcvit_xxtiny", 224, _FIXED, _NONE),
    "gemma4_vit": ("gemma4_vit_167m", 96, _ANY, {"embed_dim": 64, "depth": 2, "num_heads": 2, "img_size": 96}),
    "ghostnet": ("ghostnet_050", 96, _ANY, _NONE),
    "hardcorenas": ("hardcorenas_a", 96, _ANY, _NONE),
    "hgnet": ("hgnetv2_b0", 96, _ANY, _NONE),
    "hiera": ("hiera_tiny_224", 224, _FIXED, {"stages": (1, 1, 2, 1)}),
    "hieradet_sam2": ("sam2_hiera_tiny", 256, _FIXED, {"stages": (1, 1, 2, 1), "global_att_blocks": (3,)}),
    "hrnet": ("hrnet_w18_small", 96, _ANY, _NONE),
    "iformer": ("iformer_t", 224, _ANY, _NONE),
    "inception_next": ("inception_next_atto", 96, _ANY, _NONE),
    "inception_resnet_v2": ("inception_resnet_v2", 128, _ANY, _NONE),
    "inception_v3": ("inception_v3", 128, _ANY, _NONE),
    "inception_v4": ("inception_v4", 128, _ANY, _NONE),
    "lcnetv2": ("lcnetv2_small", 96, _ANY, _NONE),
    "levit": ("levit_128s", 224, _FIXED, _NONE),
    "lowformer": ("lowformer_b0", 96, _ANY, _NONE),
    "mambaout": ("test_mambaout", 96, _ANY, _NONE),
    "maxxvit": ("coatnet_nano_rw_224", 224, _FIXED, {"depths": (1, 1, 1, 1)}),
    "metaformer": ("poolformer_s12", 96, _ANY, _NONE),
    "mlp_mixer": ("mixer_s32_224", 224, _FIXED, _NONE),
    "mobilenetv3": ("mobilenetv3_small_050", 96, _ANY, _NONE),
    "mobilenetv5": ("mobilenetv5_base", 128, _ANY, _NONE),
    "mobilevit": ("mobilevit_xxs", 128, _ANY, _NONE),
    "mvitv2": ("mvitv2_tiny", 224, _FIXED, _NONE),
    "naflexvit": ("naflexvit_base_patch16_gap", 128, _ANY, {**_NARROW, "img_size": 128}),
    "nasnet": ("nasnetalarge", 128, _ANY, {"num_features": 672, "channel_multiplier": 2, "stem_size": 12}),
    "nest": ("nest_tiny", 224, _FIXED, _NONE),
    "nextvit": ("nextvit_small", 96, _ANY, _NONE),
    "nfnet": ("nf_ecaresnet26", 96, _ANY, _NONE),
    "pit": ("pit_ti_224", 224, _FIXED, _NONE),
    "pnasnet": ("pnasnet5large", 128, _ANY, _NONE),
    "pvt_v2": ("pvt_v2_b0", 96, _ANY, _NONE),
    "qwen3_vit": ("qwen3_vit_88m", 128, _ANY, {"embed_dim": 64, "depth": 2, "num_heads": 2, "img_size": 128}),
    "rdnet": ("rdnet_tiny", 96, _ANY, _NONE),
    "regnet": ("regnetx_002", 96, _ANY, _NONE),
    "repghost": ("repghostnet_050", 96, _ANY, _NONE),
    "repvit": ("repvit_m0_9", 96, _ANY, _NONE),
    "res2net": ("res2net50_14w_8s", 96, _ANY, {"layers": (1, 1, 1, 1)}),
    "resnest": ("resnest14d", 96, _ANY, _NONE),
    "resnet": ("resnet18", 96, _ANY, _NONE),
    "resnetv2": ("resnetv2_18", 96, _ANY, _NONE),
    "rexnet": ("rexnet_100", 96, _ANY, _NONE),
    "selecsls": ("selecsls42", 96, _ANY, _NONE),
    "senet": ("legacy_seresnet18", 96, _ANY, _NONE),
    "sequencer": ("sequencer2d_s", 224, _ANY, {"layers": (1, 1, 2, 1)}),
    "shvit": ("shvit_s1", 128, _ANY, _NONE),
    "sknet": ("skresnet18", 96, _ANY, _NONE),
    "starnet": ("starnet_s050", 96, _ANY, _NONE),
    "swiftformer": ("swiftformer_xs", 224, _ANY, _NONE),
    "swin_transformer": (
        "swin_tiny_patch4_window7_224",
        256,
        _ANY,
        {"depths": (2, 2, 2, 2), "embed_dim": 48, "strict_img_size": False},
    ),
    "swin_transformer_v2": (
        "swinv2_tiny_window8_256",
        320,
        _ANY,
        {"depths": (2, 2, 2, 2), "embed_dim": 48, "strict_img_size": False},
    ),
    "swin_transformer_v2_cr": ("swinv2_cr_small_224", 224, _FIXED, {"depths": (2, 2, 2, 2), "embed_dim": 48}),
    "tiny_vit": ("tiny_vit_5m_224", 224, _FIXED, _NONE),
    "tnt": ("tnt_s_patch16_224", 224, _FIXED, {"depth": 2}),
    "tresnet": ("tresnet_m", 96, _ANY, {"layers": (1, 1, 1, 1)}),
    "twins": ("twins_svt_small", 224, _ANY, {"depths": (2, 2, 2, 2)}),
    "vgg": ("vgg11_bn", 64, _ANY, _NONE),
    "visformer": ("visformer_tiny", 224, _FIXED, _NONE),
    "vision_transformer": ("vit_tiny_patch16_224", 224, _ANY, {"depth": 2, "dynamic_img_size": True}),
    "vision_transformer_hybrid": ("vit_tiny_r_s16_p8_224", 224, _ANY, {"depth": 2, "dynamic_img_size": True}),
    "vision_transformer_relpos": ("vit_relpos_small_patch16_224", 224, _FIXED, {"depth": 2}),
    "vision_transformer_sam": ("samvit_base_patch16_224", 224, _FIXED, {**_NARROW, "global_attn_indexes": (1,)}),
    "vitamin": ("vitamin_small_224", 224, _FIXED, _NONE),
    "volo": ("volo_d1_224", 224, _FIXED, _NONE),
    "vovnet": ("ese_vovnet19b_slim_dw", 96, _ANY, _NONE),
    "xception": ("legacy_xception", 128, _ANY, _NONE),
    "xception_aligned": ("xception41p", 96, _ANY, _NONE),
    "xcit": ("xcit_nano_12_p8_224", 224, _ANY, {"depth": 2}),
}

_MULTIPLES: Mapping[str, int] = {
    "csatv2": 32,
    "davit": 32,
    "deit": 16,
    "dla": 32,
    "eva": 14,
    "gemma4_vit": 16,
    "hrnet": 32,
    "inception_resnet_v2": 32,
    "mobilevit": 64,
    "naflexvit": 16,
    "nasnet": 32,
    "qwen3_vit": 32,
    "swin_transformer": 32,
    "swin_transformer_v2": 32,
    "tresnet": 32,
    "twins": 32,
    "vision_transformer": 16,
}

_BRANCHING: Mapping[str, int] = {
    # takes pictures of any size, but its code goes another way at some -> what they are declared to be a multiple of
    "crossvit": 1,
    "efficientvit_msra": 1,
    "hieradet_sam2": 32,
    "tiny_vit": 1,
    "vision_transformer_sam": 16,
}


def _build(name: str, smaller: Mapping[str, Any]) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=10, **smaller)
    return model


def _pictures(module: str, multiple_of: int, *, of_any_size: bool) -> ModuleCase:
    name, size, _, smaller = _MODELS[module]
    return pictures(partial(_build, name, smaller), size, of_any_size=of_any_size, multiple_of=multiple_of)


CASES: Mapping[str, ModuleCase] = {
    **{
        module: _pictures(module, _MULTIPLES.get(module, 1), of_any_size=of_any_size)
        for module, (_, _, of_any_size, _) in _MODELS.items()
    },
    **{
        f"{module} of any size": _pictures(module, multiple_of, of_any_size=True)
        for module, multiple_of in _BRANCHING.items()
    },
}
