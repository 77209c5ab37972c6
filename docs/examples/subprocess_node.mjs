// Attention in JavaScript, judged as a program of its own:
//
//     veriformer check "attention=subprocess:node docs/examples/subprocess_node.mjs"
//
// Each line on standard input is a question in JSON, each line on standard output its answer. Arrays come and go in
// .npz files: zip archives of .npy entries that are stored, not compressed.
import { readFileSync, writeFileSync } from "node:fs";
import { createInterface } from "node:readline";

const KINDS = { "<f4": Float32Array, "<f8": Float64Array, "|b1": Uint8Array };

// softmax(q k^T scale) v: q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> [B,H,Tq,Dv]; rows that see nothing give 0
function attention({ q, k, v, mask }, { causal, scale }) {
  const [B, H, Tq, D] = q.shape, [, G, Tk, Dv] = v.shape;
  const factor = scale === null ? D ** -0.5 : Number(scale);
  const out = new q.data.constructor(B * H * Tq * Dv);
  for (let row = 0; row < B * H * Tq; row++) {
    const b = Math.floor(row / (H * Tq)), h = Math.floor(row / Tq) % H, i = row % Tq;
    const keys = (b * G + Math.floor(h / (H / G))) * Tk;
    const seen = (j) => !(causal && j > i + Tk - Tq) && (!mask || mask.data[at(mask.shape, [b, h, i, j])]);
    const scores = Array.from({ length: Tk }, (_, j) => {
      let sum = 0;
      for (let d = 0; d < D; d++) sum += q.data[row * D + d] * k.data[(keys + j) * D + d];
      return seen(j) ? sum * factor : -Infinity;
    });
    const top = scores.reduce((most, s) => (s > most ? s : most), -Infinity);
    const weights = scores.map((s) => (s === -Infinity ? 0 : Math.exp(s - top)));
    const total = weights.reduce((sum, w) => sum + w, 0);
    for (let d = 0; d < Dv && total !== 0; d++) {
      let sum = 0;
      for (let j = 0; j < Tk; j++) sum += weights[j] * v.data[(keys + j) * Dv + d];
      out[row * Dv + d] = sum / total;
    }
  }
  return { shape: [B, H, Tq, Dv], data: out };
}

// the place of an element in an array whose axes may be 1, which stands for any length
function at(shape, index) {
  return shape.reduce((place, length, axis) => place * length + (length === 1 ? 0 : index[axis]), 0);
}

// { name: { shape, data } } of a file: the list of a zip's entries is at its end
function readArrays(path) {
  const file = readFileSync(path), found = {}, end = file.length - 22;
  for (let place = file.readUInt32LE(end + 16), n = file.readUInt16LE(end + 10); n > 0; n--) {
    const size = file.readUInt32LE(place + 20), start = file.readUInt32LE(place + 42);
    const length = file.readUInt16LE(place + 28), name = file.toString("utf8", place + 46, place + 46 + length);
    const body = start + 30 + file.readUInt16LE(start + 26) + file.readUInt16LE(start + 28);
    found[name.replace(/\.npy$/, "")] = readArray(file.subarray(body, body + size));
    place += 46 + length + file.readUInt16LE(place + 30) + file.readUInt16LE(place + 32);
  }
  return found;
}

// an .npy entry: 8 bytes, the length of a header like {'descr': '<f4', 'shape': (2, 3), }, the header, the numbers
function readArray(npy) {
  const begin = 10 + npy.readUInt16LE(8), header = npy.toString("latin1", 10, begin);
  const shape = header.match(/'shape': \(([^)]*)\)/)[1].split(",").filter((word) => word.trim()).map(Number);
  const kind = header.match(/'descr': '([^']*)'/)[1];
  return { shape, data: new KINDS[kind](Uint8Array.from(npy.subarray(begin)).buffer) };
}

// a file with one array
function writeArray(path, name, { shape, data }) {
  const descr = data instanceof Float32Array ? "<f4" : "<f8";
  const header = `{'descr': '${descr}', 'fortran_order': False, 'shape': (${shape.join(", ")},), }`;
  const start = Buffer.from(`\x93NUMPY\x01\x00..${header.padEnd(117)}\n`, "latin1");
  start.writeUInt16LE(118, 8);
  const body = Buffer.concat([start, Buffer.from(data.buffer)]), label = Buffer.from(`${name}.npy`);
  const about = Buffer.alloc(26); // what both places of a zip say of an entry
  about.writeUInt16LE(20, 0);
  about.writeUInt32LE(crc32(body), 10);
  about.writeUInt32LE(body.length, 14);
  about.writeUInt32LE(body.length, 18);
  about.writeUInt16LE(label.length, 22);
  const local = Buffer.concat([Buffer.from("PK\x03\x04"), about, label]);
  const listed = Buffer.concat([Buffer.from("PK\x01\x02\x14\x00"), about, Buffer.alloc(14), label]);
  const end = Buffer.alloc(22);
  end.write("PK\x05\x06");
  end.writeUInt16LE(1, 8);
  end.writeUInt16LE(1, 10);
  end.writeUInt32LE(listed.length, 12);
  end.writeUInt32LE(local.length + body.length, 16);
  writeFileSync(path, Buffer.concat([local, body, listed, end]));
}

function crc32(bytes) {
  let sum = ~0;
  for (const byte of bytes) {
    sum ^= byte;
    for (let bit = 0; bit < 8; bit++) sum = (sum >>> 1) ^ (sum & 1 ? 0xedb88320 : 0);
  }
  return ~sum >>> 0;
}

function answer(question) {
  if (question.call === "hello") {
    return { operations: { attention: ["mask", "causal", "scale"] }, dtypes: ["float64", "float32"] };
  }
  writeArray(question.results, "out", attention(readArrays(question.arrays), question.keywords));
  return { ok: true };
}

for await (const line of createInterface({ input: process.stdin })) {
  let said;
  try {
    said = answer(JSON.parse(line));
  } catch (error) {
    said = { error: String(error) };
  }
  console.log(JSON.stringify(said));
}
