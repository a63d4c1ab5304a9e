// Times llama.cpp (npm node-llama-cpp 3.21) for generation_peers.py: one thread, greedy.
//     node llama_cpp.mjs NODE_MODULES MODEL.gguf
// Each line of the input is {"prompts": [[token, ...], ...], "tokens": count}; each of the output the tokens per second
// behind the first of every stream.
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const [folder, modelPath] = process.argv.slice(2);
const {getLlama} = await import(pathToFileURL(`${folder}/node-llama-cpp/dist/index.js`));
const llama = await getLlama({build: "never", gpu: false, maxThreads: 1, logLevel: "error"});
const model = await llama.loadModel({modelPath});

async function write(prompts, count) {
    const contextSize = Math.max(...prompts.map((prompt) => prompt.length)) + count + 8;
    const context = await model.createContext({contextSize, sequences: prompts.length, threads: 1});
    let begun = 0, written = 0, start = 0;
    await Promise.all(prompts.map(async (prompt) => {
        let own = 0;
        for await (const _ of context.getSequence().evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
            own += 1;
            if (own === 1) {
                begun += 1;
                start = performance.now();
            } else if (begun === prompts.length) {
                written += 1;
            }
            if (own === count) break;
        }
    }));
    const seconds = (performance.now() - start) / 1000;
    await context.dispose();
    return written / seconds;
}

for await (const line of createInterface({input: process.stdin})) {
    const {prompts, tokens} = JSON.parse(line);
    console.log(await write(prompts, tokens));
}
process.exit(0);
