// Runs the WebAssembly program in node: node run.mjs PROGRAM.wasm ARCHIVE SHAPE < input.f32 > output.f32
import { readFile } from "node:fs/promises";
import { basename, dirname, resolve } from "node:path";
import { WASI } from "node:wasi";

const [program, archive, shape] = process.argv.slice(2);
const wasi = new WASI({
  version: "preview1",
  args: ["run-archive", `/archive/${basename(archive)}`, shape],
  preopens: { "/archive": dirname(resolve(archive)) },
});
const module = await WebAssembly.compile(await readFile(program));
process.exit(wasi.start(await WebAssembly.instantiate(module, wasi.getImportObject())));
