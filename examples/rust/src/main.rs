//! Text from a language model that `t2n-llm export` made: `generate DIR PROMPT [MOST_TOKENS]`.
//!
//! The engine keeps keys and values as its own state: token ids go in, logits come out. The likeliest token is taken, as
//! `t2n-llm generate DIR PROMPT --raw --greedy` does; the tokens are the same.

use std::io::Write;
use std::path::Path;
use std::time::Instant;

use anyhow::{ensure, Context, Result};
use serde_json::Value;
use tokenizers::Tokenizer;
use tract::prelude::*;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (folder, prompt, most) = match &arguments[..] {
        [folder, prompt] => (folder, prompt, 128),
        [folder, prompt, most] => (folder, prompt, most.parse().context("MOST_TOKENS is a number")?),
        _ => {
            eprintln!("usage: generate DIR PROMPT [MOST_TOKENS]\n  DIR: made by `t2n-llm export`");
            std::process::exit(2);
        }
    };
    let export = Export::open(Path::new(folder))?;
    let mut session = Session::open(&export)?;
    let encoding = export.tokenizer.encode(prompt.as_str(), true).map_err(anyhow::Error::msg)?;
    let ids: Vec<i64> = encoding.get_ids().iter().map(|&id| id as i64).collect();
    ensure!(!ids.is_empty(), "the prompt has no token");
    ensure!(
        ids.len() < export.positions,
        "the prompt has {} tokens, the model {} positions",
        ids.len(),
        export.positions
    );
    let most = most.min(export.positions - ids.len());

    let begun = Instant::now();
    let mut logits = session.read(&ids, &export.chunks)?;
    let first = Instant::now();
    // A character may be several tokens: text comes once it is whole.
    let mut text = export.tokenizer.decode_stream(true);
    let mut count = 0;
    while count < most {
        let next = likeliest(&logits);
        if export.ends.contains(&next) {
            break;
        }
        count += 1;
        if let Some(piece) = text.step(next as u32).map_err(anyhow::Error::msg)? {
            print!("{piece}");
            std::io::stdout().flush()?;
        }
        if count < most {
            logits = session.read(&[next], &export.chunks)?;
        }
    }
    println!();
    let (before, after) = ((first - begun).as_secs_f64(), first.elapsed().as_secs_f64());
    eprintln!("{} tokens read in {before:.2} s, {count} made in {after:.2} s", ids.len());
    Ok(())
}

/// An export folder, as far as generation needs it.
struct Export {
    archive: std::path::PathBuf,
    tokenizer: Tokenizer,
    /// How many tokens to feed at once after so many: (past, chunk), the first past is 0.
    chunks: Vec<(usize, usize)>,
    /// The model's longest context.
    positions: usize,
    /// Tokens that end a text.
    ends: Vec<i64>,
}

impl Export {
    fn open(folder: &Path) -> Result<Export> {
        let manifest = json(&folder.join("export.json"))?;
        ensure!(manifest["task"] == "text-generation", "{} is no language model", folder.display());
        let tokenizer = Tokenizer::from_file(folder.join("tokenizer.json")).map_err(anyhow::Error::msg)?;
        let settings = json(&folder.join("generation_config.json")).or_else(|_| json(&folder.join("config.json")))?;
        let ends = match &settings["eos_token_id"] {
            Value::Array(several) => several.iter().filter_map(Value::as_i64).collect(),
            one => one.as_i64().into_iter().collect(),
        };
        let number = |value: &Value| value.as_u64().map(|number| number as usize);
        let rows = manifest["graph"]["prefill"].as_array().context("export.json has no graph.prefill: export again")?;
        let chunks = rows.iter().map(|row| Some((number(&row["past"])?, number(&row["chunk"])?)));
        Ok(Export {
            archive: folder.join(manifest["archive"].as_str().context("export.json names no archive")?),
            tokenizer,
            chunks: chunks.collect::<Option<_>>().context("graph.prefill of export.json is no table")?,
            positions: number(&manifest["model"]["max_position_embeddings"]).unwrap_or(usize::MAX),
            ends,
        })
    }
}

fn json(path: &Path) -> Result<Value> {
    let text = std::fs::read(path).with_context(|| format!("{} cannot be read", path.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("{} is no JSON", path.display()))
}

/// The engine, and how many tokens its state holds.
struct Session {
    state: State,
    held: usize,
}

impl Session {
    fn open(export: &Export) -> Result<Session> {
        let mut model = tract::nnef()?.with_tract_extra()?.with_tract_transformers()?.load(&export.archive)?;
        // Caches that are inputs and outputs of the graph become the engine's own state.
        model.transform("transformers_detect_all")?;
        let inputs = model.input_count()?;
        ensure!(inputs == 1, "the archive takes {inputs} inputs: states of a fixed size (Mamba) are not fed back here");
        Ok(Session { state: model.into_runnable()?.spawn_state()?, held: 0 })
    }

    /// Reads tokens after those that are held; returns the logits of the next one.
    fn read(&mut self, ids: &[i64], chunks: &[(usize, usize)]) -> Result<Vec<f32>> {
        let (mut rest, mut logits) = (ids, vec![]);
        while !rest.is_empty() {
            let (_, most) = chunks.iter().rev().find(|(past, _)| *past <= self.held).context("no chunk")?;
            let (piece, later) = rest.split_at(rest.len().min(*most));
            let outputs = self.state.run([Tensor::from_slice(&[1, piece.len()], piece)?])?;
            let whole = outputs[0].convert_to(DatumType::F32)?;
            let (shape, values) = whole.as_shape_and_slice::<f32>()?;
            logits = values[values.len() - shape[shape.len() - 1]..].to_vec();
            (self.held, rest) = (self.held + piece.len(), later);
        }
        Ok(logits)
    }
}

/// The first of the largest.
fn likeliest(logits: &[f32]) -> i64 {
    let best = |best: usize, (place, value): (usize, &f32)| if *value > logits[best] { place } else { best };
    logits.iter().enumerate().fold(0, best) as i64
}
