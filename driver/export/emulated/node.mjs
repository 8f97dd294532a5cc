// Runs a WebAssembly program whose bridge is standard input and output: node node.mjs PROGRAM.wasm
import { readFileSync, readSync, writeSync } from "node:fs";

const moved = (move) => (at, size) => {
  for (let done = 0; done < size; ) {
    try {
      const count = move(new Uint8Array(program.exports.memory.buffer, at + done, size - done));
      if (!count) process.exit(1);
      done += count;
    } catch (error) {
      if (error.code !== "EAGAIN") throw error;
    }
  }
};
const env = {
  celosia_bridge_get: moved((bytes) => readSync(0, bytes)),
  celosia_bridge_put: moved((bytes) => writeSync(1, bytes)),
};
const program = new WebAssembly.Instance(new WebAssembly.Module(readFileSync(process.argv[2])), { env });
process.exit(program.exports.main());
