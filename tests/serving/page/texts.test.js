import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import test from "node:test";
import { CHINESE, ENGLISH, languageOf, text } from "./page/texts.js";

const placeholders = (value) => [...value.matchAll(/\{(\w+)\}/g)].map(([, name]) => name).sort();

test("both languages have the same texts with the same values", () => {
  assert.deepEqual(Object.keys(CHINESE), Object.keys(ENGLISH));
  for (const [name, english] of Object.entries(ENGLISH)) {
    assert.deepEqual(placeholders(CHINESE[name]), placeholders(english), name);
  }
});

test("every text that the page names exists, and every text is used", () => {
  const files = readdirSync("page").filter((name) => /\.(html|js)$/.test(name) && name !== "texts.js");
  const sources = files.map((name) => readFileSync(`page/${name}`, "utf-8")).join("\n");
  const named = [...sources.matchAll(/data-(?:text|label)="(\w+)"|\btext\("(\w+)"/g)].map(([, a, b]) => a ?? b);
  assert.ok(named.length > 60);
  for (const name of named) assert.ok(name in ENGLISH, name);
  const isUsed = (name) => named.includes(name) || sources.includes(`"${name}"`) || /^(term|about|line)_/.test(name) || name in { seed: 1, steps: 1 };
  assert.deepEqual(Object.keys(ENGLISH).filter((name) => !isUsed(name)), []);
});

test("Simplified Chinese for its readers, English for all others", () => {
  const tags = ["zh", "zh-CN", "zh-Hans-TW".replace("-TW", ""), "zh-SG", "zh-TW", "zh-Hant", "zh-HK", "en-US", "de", "zhx"];
  assert.deepEqual(tags.map(languageOf), ["zh", "zh", "zh", "zh", "en", "en", "en", "en", "en", "en"]);
});

test("placeholders get their values", () => assert.equal(text("step", { step: 1, steps: 2 }, ENGLISH), "step 1 of 2"));
