//! Runs an archive on one tensor: `run-archive ARCHIVE SHAPE < input.f32 > output.f32` (raw little-endian f32, C order).

use std::io::{Read, Write};
use tract_nnef::prelude::*;

fn main() -> TractResult<()> {
    let mut arguments = std::env::args().skip(1);
    let (Some(archive), Some(shape)) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: run-archive ARCHIVE SHAPE < input.f32 > output.f32\n  SHAPE: sizes with commas, such as 1,3,8,8");
        std::process::exit(2);
    };
    let shape: Vec<usize> = shape.split(',').map(str::parse).collect::<Result<_, _>>()?;

    let mut bytes = vec![];
    std::io::stdin().read_to_end(&mut bytes)?;
    let numbers: Vec<f32> =
        bytes.chunks_exact(4).map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]])).collect();
    let input = tract_ndarray::ArrayD::from_shape_vec(shape, numbers)?.into_tensor();

    // tract_core's operators are on; those of other registries come with their crates (tract-transformers, tract-extra).
    let model = tract_nnef::nnef().model_for_path(archive)?.into_optimized()?.into_runnable()?;
    let outputs = model.run(tvec!(input.into_tvalue()))?;

    let mut out = std::io::stdout().lock();
    for number in outputs[0].to_plain_array_view::<f32>()?.iter() {
        out.write_all(&number.to_le_bytes())?;
    }
    Ok(())
}
