#!/usr/bin/env python3
"""Export every causal LM architecture of the installed transformers, tiny and random, and check each in tract.

usage: scripts/nightly_zoo.py [--only mamba,mamba2] [--dtype f32,f16,q4_0] [--limit N] [--jobs N] [--results out.jsonl] ...
       scripts/nightly_zoo.py --suite timm,torchvision,torchaudio [--results modules.jsonl] ...

This is `t2n-llm zoo run` for a checkout that is not installed: the same options (--help shows them), the same exit codes.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from t2n_llm.cli.app import main

if __name__ == "__main__":
    main(["zoo", "run", *sys.argv[1:]])
