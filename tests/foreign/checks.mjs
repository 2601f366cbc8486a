// Runs the checks of a Node client: command-line flags, one line for each check, a summary line, the exit code; and programs
// of our pages. `cargo xtask` copies this file and the script to the folder of the packages.

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
/** The folder of the installed packages; programs may be written there. */
export const place = import.meta.dirname;

/** The path of a file of this repository. */
export const ours = (name) => path.join(values.root, name);

/** The first fenced block of a page in this language that holds `mark`, with this server instead of the default one. */
export function block(page, language, mark) {
  const blocks = readFileSync(ours(page), "utf8").matchAll(new RegExp(`^\`\`\`${language}\n(.*?)^\`\`\``, "gms"));
  const text = [...blocks].map(([, text]) => text).find((text) => text.includes(mark));
  const [, host, port] = server.match(/^(.*):(\d+)$/);
  return text.replaceAll("127.0.0.1", host).replaceAll("8000", port);
}

/** The output of a Node program, run from the root of the checkout; it must succeed. */
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
