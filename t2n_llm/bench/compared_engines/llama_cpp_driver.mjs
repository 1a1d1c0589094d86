// llama.cpp in node: loads a GGUF file once and answers requests, a line of JSON each, with a line of JSON.
//
// In (stdin): {"do": "load", package, file, threads, positions}, {"do": "time", fresh, turns}, {"do": "top", turns, count}.
// Out (stdout): {"ok": ...} or {"error": text}. Started by llama_cpp.py; ends when stdin closes.

import {createInterface} from "node:readline";
import {readFile} from "node:fs/promises";
import {join} from "node:path";
import {pathToFileURL} from "node:url";

const BATCH = 512; // llama.cpp's own default of tokens computed at once (n_ubatch)
const F16 = 1; // ggml_type

console.log = console.info = console.error; // stdout is for replies

let context; // of node-llama-cpp: one sequence, whose number is 0
let sequence; // the same through the public interface, for what need not be fast
let position = 0;

async function load({package: entry, file, threads, positions}) {
    const {getLlama} = await import(pathToFileURL(entry));
    const about = JSON.parse(await readFile(join(entry, "..", "..", "package.json"), "utf8"));
    // build: "never" - an old compiler must not be what is measured. maxThreads: 0 - no other limit than the one below.
    const logger = (level, message) => console.error(message);
    const llama = await getLlama({gpu: false, build: "never", logLevel: "warn", logger, maxThreads: 0});
    const start = performance.now();
    const model = await llama.loadModel({modelPath: file, gpuLayers: 0});
    context = await model.createContext({
        contextSize: positions, batchSize: BATCH, sequences: 1, threads: {ideal: threads, min: threads},
        experimentalKvCacheKeyType: F16, experimentalKvCacheValueType: F16
    });
    const seconds = (performance.now() - start) / 1000;
    context._ctx.setThreads(threads);
    return {seconds, version: `llama.cpp ${llama.llamaCppRelease.release} (node-llama-cpp ${about.version})`};
}

// One turn: llama_decode with the logits of its last token.
//
// node-llama-cpp's own calls will not do: `evaluateWithoutGeneratingNewTokens` asks llama.cpp for no logits at all, so that the
// product with the output table is left out (9.5 ms a step instead of 13.2 for SmolLM2-135M in Q4_0), and `evaluate` and
// `controlledEvaluate` also build and search a list of the whole vocabulary (14.8 ms), which the other contenders need not do.
// So the binding is called as they call it (node-llama-cpp 3.x, bindings/AddonTypes.d.ts: AddonContext).
async function turn(tokens) {
    const binding = context._ctx;
    for (let start = 0; start < tokens.length; start += BATCH) {
        const part = tokens.slice(start, start + BATCH);
        const isLast = start + BATCH >= tokens.length;
        binding.initBatch(part.length);
        binding.addToBatch(0, position, Uint32Array.from(part), Uint32Array.from(isLast ? [part.length - 1] : []));
        await binding.decodeBatch();
        position += part.length;
    }
}

async function time({fresh, turns}) {
    if (fresh)
        forget();
    const seconds = [];
    for (const tokens of turns) {
        const start = performance.now();
        await turn(tokens);
        seconds.push((performance.now() - start) / 1000);
    }
    return seconds;
}

function forget() {
    if (!context._ctx.removeTokenCellsFromSequence(0, 0, -1))
        throw new Error("llama.cpp cannot empty its cache");
    position = 0;
}

async function top({turns, count}) {
    forget();
    sequence ??= context.getSequence();
    await sequence.clearHistory();
    const wanted = {generateNext: {token: true, logits: {filter: {includeTop: count}}, options: {temperature: 0}}};
    let result;
    for (const tokens of turns) {
        const last = tokens.length - 1;
        const given = tokens.map((token, index) => index === last ? [token, wanted] : token);
        result = (await sequence.controlledEvaluate(given))[last];
    }
    await sequence.clearHistory();
    return [...result.next.logits.entries()].sort((one, other) => other[1] - one[1]);
}

const requests = {load, time, top};

async function answer(line) {
    try {
        const request = JSON.parse(line);
        return {ok: await requests[request.do](request)};
    } catch (error) {
        return {error: String(error?.message ?? error).split("\n")[0]};
    }
}

let queue = Promise.resolve();
const lines = createInterface({input: process.stdin});
lines.on("line", (line) => {
    queue = queue.then(async () => process.stdout.write(JSON.stringify(await answer(line)) + "\n"));
});
process.on("SIGINT", () => {}); // Ctrl-C reaches the whole group; the parent decides
lines.on("close", () => process.exit(0));
