//! The logits of each likeliest token after a prompt, as little-endian f32 on standard output: `logits DIR PROMPT TOKENS`.
//! `scripts/arm_check.py` holds those of another processor against PyTorch's.

use std::io::Write;
use std::path::Path;

use anyhow::{bail, Context, Result};
use generate::LanguageModel;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, prompt, most] = &arguments[..] else {
        bail!("usage: logits DIR PROMPT TOKENS");
    };
    let model = LanguageModel::open(Path::new(folder))?;
    let mut answer = model.answer(prompt, most.parse().context("TOKENS is a number")?)?;
    let mut out = std::io::stdout().lock();
    while let Some(piece) = answer.next() {
        piece?;
        for logit in answer.logits() {
            out.write_all(&logit.to_le_bytes())?;
        }
    }
    Ok(())
}
