// Evergreen over gRPC from Node: npm @grpc/grpc-js, with our .proto files loaded by npm @grpc/proto-loader.
//
// Checks echo, GENERATE with its config, half-close, failures with their details, and the program of the Evergreen page.
// Uses nothing of the Rust code but the .proto files.
//
//     node check.mjs --server 127.0.0.1:8000 --root PATH_OF_THE_CHECKOUT
//
// The last line is `N passed, N failed`; the exit code is 0 if nothing failed.

import assert from "node:assert/strict";
import { writeFileSync } from "node:fs";
import path from "node:path";
import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import protobuf from "protobufjs";
import { EVERGREEN, TIMEOUT_MS, block, ours, place, printed, run, server } from "./checks.mjs";

const PROTO = ours("crates/proto/proto");
const { evergreen } = grpc.loadPackageDefinition(
  loadSync("evergreen/v2/evergreen_service.proto", { includeDirs: [PROTO], defaults: true }),
);
const client = new evergreen.v2.EvergreenService(server, grpc.credentials.createInsecure());

/** The messages that travel as bytes inside others. */
const inner = new protobuf.Root();
inner.resolvePath = (_, target) => (protobuf.common.get(target) ? target : path.join(PROTO, target));
inner.loadSync(["sapwood/v1/config.proto", "google/rpc/status.proto", "google/rpc/error_details.proto"]);
const [GenerateConfig, Status, ErrorInfo] = ["sapwood.v1.GenerateConfig", "google.rpc.Status", "google.rpc.ErrorInfo"].map(
  (name) => inner.lookupType(name),
);

/** A session in which `talk` sends: every fragment that came, and the status that it ended with. */
function converse(talk, options = {}) {
  return new Promise((resolve) => {
    const metadata = new grpc.Metadata();
    Object.entries(options).forEach(([name, value]) => metadata.set(name, value));
    const session = client.StartSession(metadata, { deadline: Date.now() + TIMEOUT_MS });
    const fragments = [];
    session.on("data", (message) => {
      fragments.push(...message.nodeFragments);
      talk.heard?.(session, fragments);
    });
    // The status event reports failures, too.
    session.on("error", () => {});
    session.on("status", (status) => resolve({ fragments, status }));
    talk.messages.forEach((message) => session.write(message));
    if (!talk.heard) session.end();
  });
}

const params = (ports) => Object.entries(ports).map(([name, id]) => ({ name, id }));
const action = (name, inputs, outputs, more = {}) => ({ name, inputs: params(inputs), outputs: params(outputs), ...more });
const leaf = (id, text, more = {}) => ({
  id,
  chunkFragment: { metadata: { mimetype: "text/plain", role: "USER" }, data: Buffer.from(text) },
  ...more,
});
const next = (id, seq, text, continued) => ({ id, seq, continued, chunkFragment: { data: Buffer.from(text) } });

const ofNode = (fragments, id) => fragments.filter((fragment) => fragment.id === id);

/** What has come of a node. */
const soFar = (fragments, id) =>
  Buffer.concat(ofNode(fragments, id).map(({ chunkFragment }) => chunkFragment?.data ?? Buffer.alloc(0))).toString();

/** A node's content, whose fragments must be in order and end once. */
function content(fragments, id) {
  const ends = ofNode(fragments, id).map(({ seq, continued }) => [seq, continued]);
  assert.deepEqual(ends, ends.map((_, at) => [at, at + 1 < ends.length]));
  return soFar(fragments, id);
}

/** The code of a status and the reason in its details. */
function failure(status) {
  const { code, details } = Status.decode(status.metadata.get("grpc-status-details-bin")[0]);
  assert.equal(code, status.code);
  assert.deepEqual(details.map(({ type_url: url }) => url), ["type.googleapis.com/google.rpc.ErrorInfo"]);
  const { reason, domain, metadata } = ErrorInfo.decode(details[0].value);
  assert.equal(domain, "evergreen.sapwood");
  return [status.code, reason, metadata];
}

async function echoInEitherOrder() {
  const parts = [
    { actions: [action("echo", { text: "p" }, { response: "r" })] },
    { nodeFragments: [leaf("p", "hello ", { continued: true })] },
    { nodeFragments: [next("p", 1, "wörld", false)] },
  ];
  for (const messages of [parts, parts.toReversed()]) {
    const { fragments, status } = await converse({ messages });
    assert.equal(status.code, grpc.status.OK, status.details);
    assert.equal(content(fragments, "r"), "hello wörld");
  }
}

async function echoStreamsBothWays() {
  // Each word is sent when the one before has come back.
  const words = ["one ", "two ", "three "];
  const heard = (session, fragments) => {
    if (heard.sent <= words.length && soFar(fragments, "r") === words.slice(0, heard.sent).join("")) {
      session.write({ nodeFragments: [next("p", heard.sent, words[heard.sent] ?? "", heard.sent < words.length)] });
      heard.sent += 1;
      if (heard.sent > words.length) session.end();
    }
  };
  heard.sent = 1;
  const messages = [
    { actions: [action("echo", { text: "p" }, { response: "r" })] },
    { nodeFragments: [leaf("p", words[0], { continued: true })] },
  ];
  const { fragments, status } = await converse({ messages, heard });
  assert.equal(status.code, grpc.status.OK, status.details);
  assert.equal(content(fragments, "r"), words.join(""));
}

async function generateAppliesItsConfig() {
  const config = {
    type_url: "type.googleapis.com/sapwood.v1.GenerateConfig",
    value: GenerateConfig.encode(GenerateConfig.fromObject({ maxTokens: 3, temperature: 0 })).finish(),
  };
  const generate = action("GENERATE", { prompt: "p" }, { response: "r", meta: "m" }, { configs: [config] });
  const { fragments, status } = await converse({
    messages: [{ actions: [generate], nodeFragments: [leaf("p", "Say many words about rivers.")] }],
  });
  assert.equal(status.code, grpc.status.OK, status.details);
  assert.ok(content(fragments, "r").length > 0);
  assert.equal(JSON.parse(content(fragments, "m")).finish_reason, "length");
  assert.deepEqual(
    fragments.find(({ id }) => id === "r").chunkFragment.metadata,
    { mimetype: "text/plain", role: "ASSISTANT", originalFileName: "", captureTime: null, experimental: [] },
  );
}

async function runningActionsFinishAfterTheHalfClose() {
  const turns = [
    action("echo", { text: "p" }, { response: "q" }),
    // The output of one call is the input of the other.
    action("echo", { text: "q" }, { response: "r" }),
  ];
  const { fragments, status } = await converse({ messages: [{ actions: turns, nodeFragments: [leaf("p", "late")] }] });
  assert.equal(status.code, grpc.status.OK, status.details);
  assert.deepEqual([content(fragments, "q"), content(fragments, "r")], ["late", "late"]);
}

async function aMissingInputFailsAtTheHalfClose() {
  const { status } = await converse({ messages: [{ actions: [action("echo", { text: "never" }, { response: "r" })] }] });
  assert.deepEqual(failure(status).slice(0, 2), [grpc.status.FAILED_PRECONDITION, "INCOMPLETE_INPUT"]);
}

async function anAbortHasItsCodeAndDetails() {
  const cases = [
    [[leaf("n", "a"), next("n", 7, "b", false)], [], grpc.status.INVALID_ARGUMENT, "SEQ_PAST_FINAL", { node: "n", seq: "7" }],
    [[], [action("no_such", {}, { response: "r" })], grpc.status.NOT_FOUND, "UNKNOWN_ACTION", {}],
    [[], [action("fail", {}, { response: "r" })], grpc.status.INTERNAL, "FUNCTION", {}],
  ];
  for (const [nodeFragments, actions, ...expected] of cases) {
    const { status } = await converse({ messages: [{ nodeFragments, actions }] });
    const [code, reason, metadata] = failure(status);
    assert.deepEqual([code, reason], expected.slice(0, 2));
    Object.entries(expected[2]).forEach(([name, value]) => assert.equal(metadata[name], value));
  }
}

async function theSessionContinuesAfterAPartialFailure() {
  const messages = [
    { actions: [action("no_such", {}, { response: "r" })] },
    { actions: [action("echo", { text: "p" }, { response: "q" })], nodeFragments: [leaf("p", "still here")] },
  ];
  const { fragments, status } = await converse({ messages }, { "evergreen-partial-failure": "1" });
  assert.equal(status.code, grpc.status.OK, status.details);
  assert.equal(content(fragments, "q"), "still here");
  const failed = fragments.find(({ id }) => id === "r");
  assert.equal(failed.chunkFragment.metadata.mimetype, "application/x-protobuf; type=google.rpc.Status");
  assert.equal(Status.decode(failed.chunkFragment.data).code, grpc.status.NOT_FOUND);
}

function theProgramOfThePage() {
  const program = path.join(place, "page.mjs");
  writeFileSync(program, block(EVERGREEN, "javascript", "@grpc/grpc-js"));
  // The scripted model repeats the words of its prompt.
  assert.match(printed(program), /the sky blue/);
}

await run([
  echoInEitherOrder,
  echoStreamsBothWays,
  generateAppliesItsConfig,
  runningActionsFinishAfterTheHalfClose,
  aMissingInputFailsAtTheHalfClose,
  anAbortHasItsCodeAndDetails,
  theSessionContinuesAfterAPartialFailure,
  theProgramOfThePage,
]);
client.close();
