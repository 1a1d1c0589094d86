//! A language model that `t2n-llm export` made, in Rust: read its folder, ask, take the text piece by piece.
//!
//! The engine keeps keys and values as its own state: token ids go in, logits come out. The likeliest token is taken, as
//! `t2n-llm generate DIR PROMPT --raw --greedy` does; the tokens are the same.

use std::path::Path;

use anyhow::{ensure, Context, Result};
use serde_json::Value;
use tokenizers::{
    DecodeStream, DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, Tokenizer,
};
use tract::prelude::*;

#[cfg(feature = "image")]
pub mod image;
#[cfg(feature = "image")]
mod resize;

/// The engine with the model in it, the tokenizer, and what the export says of both.
pub struct LanguageModel {
    runnable: Runnable,
    tokenizer: Tokenizer,
    /// How many tokens to feed at once after so many: (past, chunk), the first past is 0.
    chunks: Vec<(usize, usize)>,
    /// The model's longest context.
    positions: usize,
    /// Tokens that end a text.
    ends: Vec<i64>,
    /// A token that is never generated: it stands for images.
    never: Option<i64>,
}

impl LanguageModel {
    /// Reads an export folder.
    pub fn open(folder: &Path) -> Result<LanguageModel> {
        let manifest = read(folder, "export.json")?;
        let archive = json(&manifest, "export.json")?["archive"].as_str().map(|name| folder.join(name));
        let model = engine()?.load(archive.context("export.json names no archive")?)?;
        LanguageModel::new(&manifest, &settings(folder)?, &read(folder, "tokenizer.json")?, model)
    }

    /// The same from the contents of the files, for those who have no folder; `settings` is generation_config.json,
    /// or config.json where there is none.
    pub fn from_bytes(manifest: &[u8], settings: &[u8], tokenizer: &[u8], archive: &[u8]) -> Result<LanguageModel> {
        LanguageModel::new(manifest, settings, tokenizer, engine()?.load_buffer(archive)?)
    }

    fn new(manifest: &[u8], settings: &[u8], tokenizer: &[u8], model: Model) -> Result<LanguageModel> {
        let manifest = json(manifest, "export.json")?;
        let task = &manifest["task"];
        ensure!(task == "text-generation", "the export is for {task}, not for text-generation");
        LanguageModel::of(&manifest, settings, tokenizer, model, 1)
    }

    /// The same for a model that takes so many inputs with the states.
    fn of(
        manifest: &Value,
        settings: &[u8],
        tokenizer: &[u8],
        mut model: Model,
        inputs: usize,
    ) -> Result<LanguageModel> {
        let ends = match &json(settings, "generation_config.json")?["eos_token_id"] {
            Value::Array(several) => several.iter().filter_map(Value::as_i64).collect(),
            one => one.as_i64().into_iter().collect(),
        };
        let rows = manifest["graph"]["prefill"].as_array().context("export.json has no graph.prefill: export again")?;
        let chunks = rows.iter().map(|row| Some((number(&row["past"])?, number(&row["chunk"])?)));
        // Caches that are inputs and outputs of the graph become the engine's own state.
        model.transform("transformers_detect_all")?;
        let left = model.input_count()?;
        ensure!(
            left == inputs,
            "the archive takes {left} inputs: states of a fixed size (Mamba) are not fed back here"
        );
        Ok(LanguageModel {
            runnable: model.into_runnable()?,
            tokenizer: Tokenizer::from_bytes(tokenizer).map_err(anyhow::Error::msg)?,
            chunks: chunks.collect::<Option<_>>().context("graph.prefill of export.json is no table")?,
            positions: number(&manifest["model"]["max_position_embeddings"]).unwrap_or(usize::MAX),
            ends,
            never: None,
        })
    }

    /// Reads a prompt; its answer, of at most so many tokens, is made as it is iterated.
    pub fn answer(&self, prompt: &str, most: usize) -> Result<Answer<'_>> {
        let ids = self.encode(prompt)?;
        self.begin(&ids, most, Box::new(|ids| Ok(vec![Tensor::from_slice(&[1, ids.len()], ids)?])))
    }

    fn encode(&self, prompt: &str) -> Result<Vec<i64>> {
        let encoding = self.tokenizer.encode(prompt, true).map_err(anyhow::Error::msg)?;
        Ok(encoding.get_ids().iter().map(|&id| id as i64).collect())
    }

    /// Reads the tokens of a prompt.
    fn begin<'model>(&'model self, ids: &[i64], most: usize, inputs: Inputs<'model>) -> Result<Answer<'model>> {
        let (count, positions) = (ids.len(), self.positions);
        ensure!(count > 0, "the prompt has no token");
        ensure!(count < positions, "the prompt has {count} tokens, the model {positions} positions");
        let mut answer = Answer {
            model: self,
            prompt: count,
            inputs,
            state: self.runnable.spawn_state()?,
            held: 0,
            logits: vec![],
            unread: None,
            left: most.min(positions - count),
            text: self.tokenizer.decode_stream(true),
        };
        answer.read(ids)?;
        Ok(answer)
    }
}

/// Splits the engine's matrix products over so many threads, in the whole process; all cores where it is None.
#[cfg(not(target_family = "wasm"))]
pub fn use_threads(threads: Option<usize>) {
    use tract_linalg::multithread::{set_default_executor, Executor};
    let all = || std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let threads = threads.unwrap_or_else(all);
    set_default_executor(if threads > 1 { Executor::multithread(threads) } else { Executor::SingleThread });
}

fn engine() -> Result<Nnef> {
    tract::nnef()?.with_tract_extra()?.with_tract_transformers()
}

fn read(folder: &Path, name: &str) -> Result<Vec<u8>> {
    std::fs::read(folder.join(name)).with_context(|| format!("{} cannot be read", folder.join(name).display()))
}

fn settings(folder: &Path) -> Result<Vec<u8>> {
    read(folder, "generation_config.json").or_else(|_| read(folder, "config.json"))
}

fn number(value: &Value) -> Option<usize> {
    value.as_u64().map(|number| number as usize)
}

fn json(text: &[u8], name: &str) -> Result<Value> {
    serde_json::from_slice(text).with_context(|| format!("{name} is no JSON"))
}

type Text<'model> =
    DecodeStream<'model, ModelWrapper, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// Makes the inputs of the engine for the next tokens.
type Inputs<'model> = Box<dyn FnMut(&[i64]) -> Result<Vec<Tensor>> + 'model>;

/// One answer: an item for each token, with the text that it completes, which may be none (a character of several tokens).
pub struct Answer<'model> {
    model: &'model LanguageModel,
    /// How many tokens the prompt has.
    pub prompt: usize,
    inputs: Inputs<'model>,
    state: State,
    /// How many tokens the engine's state holds.
    held: usize,
    logits: Vec<f32>,
    /// The last token, given out before the engine reads it.
    unread: Option<i64>,
    left: usize,
    text: Text<'model>,
}

impl Iterator for Answer<'_> {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Result<String>> {
        if self.left == 0 {
            return None;
        }
        if let Some(Err(error)) = self.unread.take().map(|token| self.read(&[token])) {
            return Some(Err(error));
        }
        let token = likeliest(&self.logits);
        if self.model.ends.contains(&token) {
            self.left = 0;
            return None;
        }
        (self.unread, self.left) = (Some(token), self.left - 1);
        Some(self.text.step(token as u32).map(Option::unwrap_or_default).map_err(anyhow::Error::msg))
    }
}

impl Answer<'_> {
    /// What the last token was chosen by: a number for each token of the vocabulary.
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// Reads tokens after those that are held; leaves the logits of the next one.
    fn read(&mut self, ids: &[i64]) -> Result<()> {
        let mut rest = ids;
        while !rest.is_empty() {
            let chunk = self.model.chunks.iter().rev().find(|(past, _)| *past <= self.held);
            let (piece, later) = rest.split_at(rest.len().min(chunk.context("no chunk")?.1));
            let outputs = self.state.run((self.inputs)(piece)?)?;
            let whole = outputs[0].convert_to(DatumType::F32)?;
            let (shape, values) = whole.as_shape_and_slice::<f32>()?;
            self.logits = values[values.len() - shape[shape.len() - 1]..].to_vec();
            (self.held, rest) = (self.held + piece.len(), later);
        }
        if let Some(token) = self.model.never {
            self.logits[token as usize] = f32::NEG_INFINITY;
        }
        Ok(())
    }
}

/// The first of the largest.
fn likeliest(logits: &[f32]) -> i64 {
    let best = |best: usize, (place, value): (usize, &f32)| if *value > logits[best] { place } else { best };
    logits.iter().enumerate().fold(0, best) as i64
}
