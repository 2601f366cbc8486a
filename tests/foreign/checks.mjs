// How the checks of a client in Node are run and told, and programs out of our pages.
//
// Owns: the flags, one line per check, the plain last line, the exit code; where our files are. Refuses to know: the client.
// A script finds this beside it: what runs it copies both to where the packages are.

import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import path from "node:path";
import { parseArgs } from "node:util";

export const TIMEOUT_MS = 30_000;
export const EVERGREEN = "docs/faces/evergreen.md";

const { values } = parseArgs({
  options: {
    server: { type: "string", default: "127.0.0.1:8000" },
    root: { type: "string", default: process.cwd() },
  },
});

/** host:port of the server. */
export const server = values.server;
/** Where packages are installed, and programs may be written. */
export const place = import.meta.dirname;

/** A file of ours. */
export const ours = (name) => path.join(values.root, name);

/** The first fenced block of a page in this language that holds `mark`, with the server in place of the usual one. */
export function block(page, language, mark) {
  const blocks = readFileSync(ours(page), "utf8").matchAll(new RegExp(`^\`\`\`${language}\n(.*?)^\`\`\``, "gms"));
  const text = [...blocks].map(([, text]) => text).find((text) => text.includes(mark));
  const [, host, port] = server.match(/^(.*):(\d+)$/);
  return text.replaceAll("127.0.0.1", host).replaceAll("8000", port);
}

/** What a program of Node prints that must succeed, run from the root of the checkout. */
export function printed(...words) {
  return execFileSync(process.execPath, words, { cwd: values.root, encoding: "utf8", timeout: TIMEOUT_MS });
}

/** Runs each check; the exit code is 0 if nothing failed. */
export async function run(checks) {
  let failed = 0;
  for (const check of checks) {
    try {
      await check();
      console.log(`ok      ${check.name}`);
    } catch (error) {
      failed += 1;
      console.log(`FAILED  ${check.name}`);
      console.error(error);
    }
  }
  console.log(`${checks.length - failed} passed, ${failed} failed`);
  process.exitCode = failed ? 1 : 0;
}
