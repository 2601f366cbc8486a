// Evergreen from Node: npm ws, with JSON as the TypeScript client sends it, and npm @msgpack/msgpack, whose integers
// are not those of Action Engine.
//
// Checks recorded frames of the TypeScript client, the byte samples of msgpack, every integer encoding of this library,
// small frames, and the program of the Evergreen page.
//
//     node check.mjs --server 127.0.0.1:8000 --root PATH_OF_THE_CHECKOUT
//
// The last line is `N passed, N failed`; the exit code is 0 if nothing failed.

import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";
import path from "node:path";
import { decodeMulti, encode } from "@msgpack/msgpack";
import WebSocket from "ws";
import { EVERGREEN, TIMEOUT_MS, block, ours, place, printed, run, server } from "./checks.mjs";

/** Opens a socket, lets `talk` send, and returns all messages until the Close frame. */
function converse(target, talk, protocols = []) {
  return new Promise((resolve, reject) => {
    const socket = new WebSocket(`ws://${server}${target}`, protocols);
    const said = [];
    const late = setTimeout(() => reject(new Error("no Close in time")), TIMEOUT_MS);
    socket.on("open", () => talk(socket));
    socket.on("message", (data, isBinary) => said.push({ data, isBinary }));
    socket.on("error", reject);
    socket.on("close", (code, reason) => {
      clearTimeout(late);
      resolve({ said, code, reason: reason.toString() });
    });
  });
}

// --- JSON -------------------------------------------------------------------------------------------------------------

const FINISH = JSON.stringify({ actions: [{ name: "FINISH" }] });

/** The frames that @google/actionengine 0.0.5 sends for one prompt, ids aside. */
function recorded(prompt) {
  const data = Buffer.from(prompt).toString("base64");
  const metadata = { mimetype: "text/plain", role: "USER" };
  return [
    {
      actions: [
        {
          targetSpec: { id: "evergreen://scripted" },
          name: "GENERATE",
          inputs: [{ name: "prompt", id: "u1" }],
          outputs: [{ name: "response", id: "u2" }],
        },
      ],
    },
    { nodeFragments: [{ id: "u1", chunkFragment: { metadata, data }, seq: 0, continued: true }] },
    { nodeFragments: [{ id: "u1", seq: 1, continued: false }] },
  ].map((message) => JSON.stringify(message));
}

/** EV-724: chunks are counted, since the client's own readers of version 0.0.5 are never told that a stream has ended. */
async function theTypescriptClientsFramesAreAnswered() {
  const { said, code } = await converse("/", (socket) => {
    [...recorded("Hi!"), FINISH].forEach((text) => socket.send(text));
  });
  assert.equal(code, 1000);
  assert.ok(said.every(({ isBinary }) => !isBinary));
  const fragments = said.flatMap(({ data }) => JSON.parse(data).nodeFragments ?? []);
  assert.ok(fragments.length > 1);
  fragments.forEach((fragment, seq) => {
    assert.equal(fragment.id, "u2");
    assert.equal(fragment.seq, seq);
    assert.equal(fragment.continued, seq + 1 < fragments.length);
    // The client types each fragment by itself, and its parser wants exactly one slash.
    assert.deepEqual(fragment.chunkFragment.metadata, { mimetype: "text/plain", role: "ASSISTANT" });
    assert.equal(fragment.childIds, undefined);
  });
}

async function jsonIsAcceptedInBinaryMessages() {
  const { said, code } = await converse("/evergreen", (socket) => {
    [...recorded("Hi!"), FINISH].forEach((text) => socket.send(Buffer.from(text)));
  });
  assert.equal(code, 1000);
  assert.ok(said.length > 0 && said.every(({ isBinary }) => !isBinary));
}

async function aMalformedMessageGetsAnError() {
  const { said, code, reason } = await converse("/evergreen", (socket) => socket.send("{]"), ["evergreen.v2.json"]);
  const { error } = JSON.parse(said.at(-1).data);
  assert.equal(error.status, "INVALID_ARGUMENT");
  assert.equal(error.details[0].reason, "BAD_MESSAGE");
  assert.deepEqual([code, reason], [1007, "INVALID_ARGUMENT: BAD_MESSAGE"]);
}

// --- msgpack ----------------------------------------------------------------------------------------------------------

/** A struct of Action Engine: its values, one after the other, in a bin. */
const struct = (...fields) => Buffer.concat(fields.map((field) => (Buffer.isBuffer(field) ? field : Buffer.from(encode(field)))));
const bin = (bytes) => Buffer.from(encode(new Uint8Array(bytes)));
const list = (structs) => Buffer.from(encode(structs.map((bytes) => new Uint8Array(bytes))));

const port = (name, id) => struct(name, id);
const call = (id, name, inputs, outputs) =>
  struct(id, name, list(inputs.map(([p, n]) => port(p, n))), list(outputs.map(([p, n]) => port(p, n))), 0);
const chunk = (bytes, mimetype) => struct(bin(bytes), "", bin(struct(mimetype, null, 0)));
const fragment = (node, seq, bytes, continued) =>
  struct(0, bin(chunk(bytes, "text/plain")), continued, node, seq);
const wire = (fragments, actions) => bin(struct(list(fragments), list(actions), 0));
const HALF_CLOSE = wire([], []);

/** A byte sample, by its name. */
function sample(name) {
  const lines = readFileSync(ours("testdata/evergreen/msgpack/samples.txt"), "utf8").split("\n");
  const line = lines.find((line) => line.startsWith(`${name} `));
  return Buffer.from(line.slice(name.length).replaceAll(" ", ""), "hex");
}

/** The fragments of a WireMessage: id, seq, continued, data, mimetype. */
function read(message) {
  const fields = (bytes) => [...decodeMulti(bytes)];
  const [outer] = fields(message);
  const [fragments] = fields(outer);
  return fragments.map((bytes) => {
    const [, content, continued, id, seq] = fields(bytes);
    const [data, , described] = fields(content);
    return { id, seq, continued, data: Buffer.from(data), mimetype: fields(described)[0] };
  });
}

/** EV-730 */
function theSamplesEqualTheEncodingOfThisLibrary() {
  const yo = (seq) => wire([fragment("q", seq, Buffer.from("yo"), true)], []);
  assert.deepEqual(HALF_CLOSE, sample("half-close"));
  assert.deepEqual(yo(0), sample("fragment"));
  assert.deepEqual(wire([], [call("A1", "GENERATE", [["prompt", "p"]], [["response", "r"]])]), sample("action"));
  const end = struct(0, bin(chunk([], "application/octet-stream")), false, "q", 1);
  assert.deepEqual(wire([end], []), sample("null-chunk"));
  // From here on the encodings of integers differ, but not their values.
  assert.notDeepEqual(yo(128), sample("fragment-at-128"));
  assert.deepEqual(read(yo(128)), read(sample("fragment-at-128")));
}

/** EV-730, EV-735, EV-736, EV-738 */
async function theSamplesRunAsASession() {
  const samples = ["action", "fragment", "null-chunk", "half-close"].map(sample);
  // The prompt of the sample's action is named p, the fragments' node q: the ids have one length.
  const [action, first, last, halfClose] = samples.map((bytes) => Buffer.from(bytes.toString("latin1").replace("\xa1q", "\xa1p"), "latin1"));
  const { said, code } = await converse("/", (socket) => [action, first, last, halfClose].forEach((bytes) => socket.send(bytes)));
  assert.equal(code, 1000);
  assert.deepEqual(said.at(-1).data, sample("half-close"));
  const all = said.flatMap(({ data }) => read(data));
  assert.ok(Buffer.concat(all.filter(({ id }) => id === "r").map(({ data }) => data)).length > 0);
  const [ok] = read(sample("status-ok"));
  assert.deepEqual(all.at(-1), ok);
  assert.deepEqual(all.find(({ id }) => id === "A1#__dispatch_status__").data, ok.data);
}

/** EV-739 */
async function anAbortEqualsTheSample() {
  const past = [fragment("q", 0, Buffer.from("yo"), true), fragment("", 1, Buffer.from("yo"), false)];
  const { said, code } = await converse("/", (socket) => socket.send(wire(past, [])));
  assert.equal(code, 1011);
  const [told] = read(said.at(-1).data);
  const [abort] = read(sample("abort"));
  assert.deepEqual({ ...told, data: told.data[0] }, { ...abort, data: abort.data[0] });
}

async function unsignedIntegersAreAccepted() {
  const count = 70_000;
  const { said, code } = await converse("/", (socket) => {
    socket.send(wire([], [call("A", "echo_async", [["text", "p"]], [["response", "r"]])]));
    for (let from = 0; from < count; from += 1_000) {
      const seqs = Array.from({ length: 1_000 }, (_, index) => from + index);
      socket.send(wire(seqs.map((seq) => fragment("p", seq, Buffer.from("x"), seq + 1 < count)), []));
    }
    socket.send(HALF_CLOSE);
  });
  assert.equal(code, 1000);
  assert.ok(said.every(({ isBinary }) => isBinary));
  assert.deepEqual(said.at(-1).data, HALF_CLOSE);
  const all = said.flatMap(({ data }) => read(data));
  const response = all.filter(({ id }) => id === "r");
  assert.deepEqual(
    response.map(({ seq }) => seq),
    response.map((_, index) => index),
  );
  assert.equal(Buffer.concat(response.map(({ data }) => data)).length, count);
  assert.equal(all.at(-1).id, "A#__status__");
  assert.deepEqual([all.at(-1).mimetype, [...all.at(-1).data]], ["__status__", [0]]);
}

async function messagesMayComeInOneByteFrames() {
  const { said, code } = await converse(
    "/evergreen",
    (socket) => {
      const bytes = wire(
        [fragment("p", 0, Buffer.from("small"), false)],
        [call("A", "echo_async", [["text", "p"]], [["response", "r"]])],
      );
      [...bytes].forEach((byte, at) => socket.send(Buffer.from([byte]), { fin: at + 1 === bytes.length }));
      socket.send(HALF_CLOSE);
    },
    ["actionengine.msgpack"],
  );
  assert.equal(code, 1000);
  const response = said.flatMap(({ data }) => read(data)).filter(({ id }) => id === "r");
  assert.equal(Buffer.concat(response.map(({ data }) => data)).toString(), "small");
}

async function anUnknownActionDoesNotEndTheSession() {
  const { said, code } = await converse("/", (socket) => {
    socket.send(wire([], [call("A", "nobody", [], [["response", ""]])]));
    socket.send(HALF_CLOSE);
  });
  assert.equal(code, 1000);
  const all = said.flatMap(({ data }) => read(data));
  for (const node of ["A#__dispatch_status__", "A#response", "A#__status__"]) {
    const { data } = all.find(({ id }) => id === node);
    assert.deepEqual([data[0], data.subarray(1).toString()], [5, "Action not found in registry: nobody."]);
  }
}

// ----------------------------------------------------------------------------------------------------------------------

/** The page's program, judged and made JavaScript by the compiler that people use. */
function theProgramOfThePage() {
  const program = path.join(place, "page.ts");
  writeFileSync(program, block(EVERGREEN, "typescript", "evergreen.v2.json"));
  const options = ["--strict", "--module", "nodenext", "--target", "es2022", "--skipLibCheck"];
  printed(path.join(place, "node_modules/typescript/bin/tsc"), ...options, program);
  // The scripted model repeats the words of its prompt.
  assert.match(printed(program.replace(/ts$/, "js")), /the sky blue/);
}

await run([
  theTypescriptClientsFramesAreAnswered,
  jsonIsAcceptedInBinaryMessages,
  aMalformedMessageGetsAnError,
  theSamplesEqualTheEncodingOfThisLibrary,
  theSamplesRunAsASession,
  anAbortEqualsTheSample,
  unsignedIntegersAreAccepted,
  messagesMayComeInOneByteFrames,
  anUnknownActionDoesNotEndTheSession,
  theProgramOfThePage,
]);
