//! Text from a language model that `t2n-llm export` made: `generate DIR PROMPT [MOST_TOKENS] [--threads N]`.

use std::io::Write;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use generate::{use_threads, LanguageModel};

fn main() -> Result<()> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut threads = None;
    if let Some(place) = arguments.iter().position(|argument| argument == "--threads") {
        let number = arguments.get(place + 1).and_then(|text| text.parse::<usize>().ok()).filter(|&number| number > 0);
        threads = Some(number.context("--threads takes a number from 1 on")?);
        arguments.drain(place..place + 2);
    }
    use_threads(threads);
    let (folder, prompt, most) = match &arguments[..] {
        [folder, prompt] => (folder, prompt, 128),
        [folder, prompt, most] => (folder, prompt, most.parse().context("MOST_TOKENS is a number")?),
        _ => {
            eprintln!("usage: generate DIR PROMPT [MOST_TOKENS] [--threads N]\n  DIR: made by `t2n-llm export`");
            std::process::exit(2);
        }
    };
    let model = LanguageModel::open(Path::new(folder))?;
    let begun = Instant::now();
    let mut answer = model.answer(prompt, most)?;
    let first = Instant::now();
    let mut count = 0;
    for piece in &mut answer {
        print!("{}", piece?);
        std::io::stdout().flush()?;
        count += 1;
    }
    println!();
    let (before, after) = ((first - begun).as_secs_f64(), first.elapsed().as_secs_f64());
    eprintln!("{} tokens read in {before:.2} s, {count} made in {after:.2} s", answer.prompt);
    Ok(())
}
