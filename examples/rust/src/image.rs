//! A vision-language model that `t2n-llm export --task image-text-to-text` made: text about images.
//!
//! An image file becomes pixels of the size that `export.json` records; `frontend` makes the model's input of them, and `vision`
//! rows of embeddings. `embed` makes embeddings of token ids; those of image tokens are replaced with these rows. The decoder
//! takes embeddings, and keeps keys and values as the engine's own state.

use std::path::Path;
use std::vec::IntoIter;

use anyhow::{bail, ensure, Context, Result};
use image::{DynamicImage, ImageDecoder, ImageReader};
use serde_json::Value;
use tract::prelude::*;

use crate::resize::resize;
use crate::{engine, json, number, read, settings, Answer, LanguageModel};

/// The archives in the engine, and what the export says of them.
pub struct ImageModel {
    /// The decoder, with the tokenizer.
    language: LanguageModel,
    frontend: Runnable,
    vision: Runnable,
    embed: Runnable,
    /// How the front end wants images resized: `frontend.resize`.
    resize: Value,
    /// What `vision` takes; a size may be a symbol, the number of images.
    shape: Value,
    /// The token that stands for a row of an image in a prompt.
    image_token: i64,
    /// How many rows an image has.
    rows: usize,
    /// Whether the decoder takes `token_type_ids`: 1 where an image is.
    token_types: bool,
}

impl ImageModel {
    /// Reads an export folder.
    pub fn open(folder: &Path) -> Result<ImageModel> {
        let manifest = json(&read(folder, "export.json")?, "export.json")?;
        let task = &manifest["task"];
        ensure!(task == "image-text-to-text", "the export is for {task}, not for image-text-to-text");
        let described = &manifest["multimodal"];
        let token_types = takes_token_types(&manifest)?;
        let outputs = &manifest["frontend"]["outputs"];
        ensure!(!outputs.is_null(), "the export has no frontend: export.json describes no preprocessing of images");
        ensure!(
            *outputs == serde_json::json!(["pixel_values"]),
            "the front end gives {outputs}, not only pixel_values"
        );
        let rows = &described["rows_per_image"];
        let rows =
            number(rows).with_context(|| format!("an image has {rows} rows: only images of one size are read"))?;
        let load = |role: &str| {
            let name = manifest["archives"][role]["archive"].as_str();
            engine()?.load(folder.join(name.with_context(|| format!("export.json names no archive {role}"))?))
        };
        let run = |role: &str| load(role)?.into_runnable();
        let inputs = 1 + usize::from(token_types);
        let mut language = LanguageModel::of(
            &manifest,
            &settings(folder)?,
            &read(folder, "tokenizer.json")?,
            load("decoder")?,
            inputs,
        )?;
        let image_token = described["image_token_id"].as_i64().context("export.json has no image_token_id")?;
        language.never = Some(image_token);
        if token_types {
            // Rows of an image see each other, so all of them are read at once.
            language.chunks = vec![(0, usize::MAX)];
        }
        Ok(ImageModel {
            language,
            frontend: run("frontend")?,
            vision: run("vision")?,
            embed: run("embed")?,
            resize: manifest["frontend"]["resize"].clone(),
            shape: described["pixel_values"]["shape"].clone(),
            image_token,
            rows,
            token_types,
        })
    }

    /// Reads a prompt about PNG or JPEG files; see `LanguageModel::answer`. The prompt has the model's image token once where
    /// each image goes, with the tokens that the model expects around it; without any, the images come first.
    pub fn answer(&self, prompt: &str, images: &[impl AsRef<Path>], most: usize) -> Result<Answer<'_>> {
        let token =
            self.language.tokenizer.id_to_token(self.image_token as u32).context("the image token is unknown")?;
        let mut ids = self.language.encode(prompt)?;
        if !ids.contains(&self.image_token) {
            ids = self.language.encode(&(token.repeat(images.len()) + prompt))?;
        }
        let places = ids.iter().filter(|&&id| id == self.image_token).count();
        ensure!(places == images.len(), "the prompt has {token} {places} times, for {} images", images.len());
        let count = |id: i64| if id == self.image_token { self.rows } else { 1 };
        let ids: Vec<i64> = ids.iter().flat_map(|&id| std::iter::repeat_n(id, count(id))).collect();
        let mut rows = vec![];
        for file in images {
            rows.extend(self.see(file.as_ref())?);
        }
        let mut rows = rows.into_iter();
        self.language.begin(&ids, most, Box::new(move |ids| self.inputs(ids, &mut rows)))
    }

    /// The decoder's inputs for tokens: their embeddings, those of image tokens replaced with the next rows.
    fn inputs(&self, ids: &[i64], rows: &mut IntoIter<f32>) -> Result<Vec<Tensor>> {
        let embedded = self.embed.run([Tensor::from_slice(&[1, ids.len()], ids)?])?[0].convert_to(DatumType::F32)?;
        let (shape, values) = embedded.as_shape_and_slice::<f32>()?;
        let mut values = values.to_vec();
        let types: Vec<i64> = ids.iter().map(|&id| i64::from(id == self.image_token)).collect();
        for (row, _) in values.chunks_exact_mut(shape[2]).zip(&types).filter(|(_, &is_image)| is_image == 1) {
            row.iter_mut().zip(&mut *rows).for_each(|(value, seen)| *value = seen);
        }
        let taken = self.language.runnable.input_fact(0)?.datum_type()?;
        let mut inputs = vec![Tensor::from_slice(shape, &values)?.convert_to(taken)?];
        if self.token_types {
            inputs.push(Tensor::from_slice(&[1, ids.len()], &types)?);
        }
        Ok(inputs)
    }

    /// The rows of embeddings of an image, one after the other.
    fn see(&self, file: &Path) -> Result<Vec<f32>> {
        let pixels = self.pixels(file).with_context(|| format!("{} cannot be read", file.display()))?;
        let values = self.frontend.run([pixels])?.remove(0).convert_to(self.vision.input_fact(0)?.datum_type()?)?;
        let (made, taken) =
            (values.shape()?, self.shape.as_array().context("export.json has no shape of pixel_values")?);
        let fits = |(size, wanted): (&usize, &Value)| wanted.is_string() || number(wanted) == Some(*size);
        ensure!(
            made.len() == taken.len() && made.iter().zip(taken).all(fits),
            "vision takes pixel_values {}, but the front end gives {made:?}: images in tiles are not supported here",
            self.shape
        );
        let seen = self.vision.run([values])?[0].convert_to(DatumType::F32)?;
        let (shape, values) = seen.as_shape_and_slice::<f32>()?;
        let rows = values.len() / shape[shape.len() - 1];
        ensure!(rows == self.rows, "the image has {rows} rows, but export.json records {}", self.rows);
        Ok(values.to_vec())
    }

    /// What the front end takes: uint8 [1, height, width, 3].
    fn pixels(&self, file: &Path) -> Result<Tensor> {
        let mut decoder = ImageReader::open(file)?.with_guessed_format()?.into_decoder()?;
        let orientation = decoder.orientation()?;
        let mut picture = DynamicImage::from_decoder(decoder)?;
        picture.apply_orientation(orientation);
        let picture = picture.into_rgb8();
        let from = (picture.height() as usize, picture.width() as usize);
        let to = self.size(from)?;
        let filter = self.resize["filter"].as_str().context("export.json records no filter")?;
        Tensor::from_slice(&[1, to.0, to.1, 3], &resize(&picture, from, to, filter)?)
    }

    /// The height and width that an image gets.
    fn size(&self, (height, width): (usize, usize)) -> Result<(usize, usize)> {
        let edge = |name: &str| number(&self.resize[name]);
        if let (Some(height), Some(width)) = (edge("height"), edge("width")) {
            return Ok((height, width));
        }
        let (Some(shortest), None) = (edge("shortest_edge"), edge("longest_edge")) else {
            bail!("images are resized by a rule that is not supported here: {}", self.resize);
        };
        let longest = shortest * height.max(width) / height.min(width);
        Ok(if height < width { (shortest, longest) } else { (longest, shortest) })
    }
}

/// Whether the decoder takes `token_type_ids` that mark images. It must take nothing else with the embeddings.
fn takes_token_types(manifest: &Value) -> Result<bool> {
    let states: Vec<&Value> = manifest["graph"]["states"].as_array().into_iter().flatten().collect();
    let mut token_types = false;
    for name in manifest["graph"]["inputs"].as_array().context("export.json has no graph.inputs: export again")? {
        match name.as_str().unwrap_or_default() {
            "inputs_embeds" => {}
            "token_type_ids" => {
                let meaning = manifest["multimodal"]["token_type_ids"].as_str().unwrap_or_default();
                ensure!(meaning.starts_with("1 at rows of images"), "token_type_ids are not supported here: {meaning}");
                token_types = true;
            }
            _ if states.iter().any(|state| state["input_name"] == *name) => {}
            further => bail!("the decoder takes {further}, which this program does not make"),
        }
    }
    Ok(token_types)
}
