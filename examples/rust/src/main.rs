//! Text from a model that `t2n-llm export` made: `generate DIR PROMPT [MOST_TOKENS] [--image FILE] [--threads N]`.

use std::io::Write;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use generate::image::ImageModel;
use generate::{use_threads, Answer, LanguageModel};

const USAGE: &str = "usage: generate DIR PROMPT [MOST_TOKENS] [--image FILE] [--threads N]
  DIR: made by `t2n-llm export`
  --image: a PNG or JPEG file, for exports of --task image-text-to-text; may be repeated";

fn main() -> Result<()> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut images = vec![];
    while let Some(file) = option(&mut arguments, "--image")? {
        images.push(file);
    }
    let threads =
        option(&mut arguments, "--threads")?.map(|text| text.parse::<usize>().ok().filter(|&number| number > 0));
    use_threads(threads.map(|number| number.context("--threads takes a number from 1 on")).transpose()?);
    let (folder, prompt, most) = match &arguments[..] {
        [folder, prompt] => (Path::new(folder), prompt, 128),
        [folder, prompt, most] => (Path::new(folder), prompt, most.parse().context("MOST_TOKENS is a number")?),
        _ => {
            eprintln!("{USAGE}");
            std::process::exit(2);
        }
    };
    if images.is_empty() {
        let model = LanguageModel::open(folder)?;
        write(|| model.answer(prompt, most))
    } else {
        let model = ImageModel::open(folder)?;
        write(|| model.answer(prompt, &images, most))
    }
}

/// Takes an option and its value out of the arguments.
fn option(arguments: &mut Vec<String>, name: &str) -> Result<Option<String>> {
    let Some(place) = arguments.iter().position(|argument| argument == name) else {
        return Ok(None);
    };
    arguments.remove(place);
    anyhow::ensure!(place < arguments.len(), "{name} takes a value");
    Ok(Some(arguments.remove(place)))
}

fn write<'model>(begin: impl FnOnce() -> Result<Answer<'model>>) -> Result<()> {
    let begun = Instant::now();
    let mut answer = begin()?;
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
