//! The logits of each likeliest token after a prompt, as little-endian f32 on standard output: `logits DIR PROMPT TOKENS [IMAGE ...]`.
//! `scripts/arm_check.py` holds those of another processor against PyTorch's.

use std::io::Write;
use std::path::Path;

use anyhow::{bail, Context, Result};
use generate::image::ImageModel;
use generate::{Answer, LanguageModel};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, prompt, most, images @ ..] = &arguments[..] else {
        bail!("usage: logits DIR PROMPT TOKENS [IMAGE ...]");
    };
    let most = most.parse().context("TOKENS is a number")?;
    if images.is_empty() {
        write(LanguageModel::open(Path::new(folder))?.answer(prompt, most)?)
    } else {
        write(ImageModel::open(Path::new(folder))?.answer(prompt, images, most)?)
    }
}

fn write(mut answer: Answer) -> Result<()> {
    let mut out = std::io::stdout().lock();
    while let Some(piece) = answer.next() {
        piece?;
        for logit in answer.logits() {
            out.write_all(&logit.to_le_bytes())?;
        }
    }
    Ok(())
}
