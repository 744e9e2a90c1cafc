import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";
import { check, choiceOf, keyOf, linkOf, nameOf, readFile, readLink } from "./page/settings.js";

const MODEL = {
  sizes: ["64x48", "64x64", "512x512"],
  tome_ratios: [0.5, 0.25, 0],
  prompt_characters: 10,
  ranges: { seed: [0, 2 ** 32 - 1], steps: [1, 50], guidance_scale: [0, 30] },
};
const TYPED = { prompt: "a fox", seed: "7", steps: "20", guidance_scale: "2.5", size: "64x48", tome_ratio: "0.5" };
const SETTINGS = { prompt: "a fox", negative_prompt: "", seed: 7, steps: 20, guidance_scale: 2.5, size: "64x48", tome_ratio: 0.5 };

test("ratios and sizes as people write them", () => {
  for (const [text, ratio] of [[".5", 0.5], ["0", 0], [0, 0], ["0.250", 0.25], ["-0", 0]]) {
    assert.ok(choiceOf("tome_ratio", text, MODEL) == ratio, text);
  }
  const third = { ...MODEL, tome_ratios: [0.5, 1 / 3] };
  for (const [text, ratio] of [[`${1 / 3}`, 1 / 3], ["0.333333", 1 / 3], ["0.3333", undefined]]) {
    assert.equal(choiceOf("tome_ratio", text, third), ratio, text);
  }
  for (const text of ["", " ", "0.3", "much", "NaN"]) assert.equal(choiceOf("tome_ratio", text, MODEL), undefined, text);
  for (const [text, size] of [["512", "512x512"], ["64 × 48", "64x48"], ["64X64", "64x64"], ["9x9", undefined]]) {
    assert.equal(choiceOf("size", text, MODEL), size);
  }
});

test("what is typed becomes settings, or an error at its field", () => {
  assert.deepEqual(check(TYPED, MODEL), { settings: SETTINGS, errors: [] });
  const wrong = { prompt: "x".repeat(11), seed: "-1", steps: "2.5", guidance_scale: "", size: "9x9", tome_ratio: "1" };
  const { settings, errors } = check(wrong, MODEL);
  assert.equal(settings, null);
  assert.deepEqual(errors.map(([name, message]) => [name, message]), [
    ["prompt", "longPrompt"], ["seed", "wholeNumber"], ["steps", "wholeNumber"], ["guidance_scale", "number"],
    ["size", "notExported"], ["tome_ratio", "notExported"],
  ]);
  assert.equal(check({ ...TYPED, prompt: "狐🦊".repeat(5) }, MODEL).errors.length, 0, "characters, not code units");
});

test("strength, with an image only", () => {
  assert.equal(check({ ...TYPED, strength: "0.6" }, MODEL).settings.strength, 0.6);
  for (const [strength, message] of [["0", "number"], ["1.1", "number"], ["", "number"], ["0.01", "noStep"]]) {
    assert.equal(check({ ...TYPED, strength }, MODEL).errors[0]?.[1], message, strength);
  }
});

test("a link has the settings, and only those", () => {
  const settings = { ...SETTINGS, prompt: "a & b, 狐", negative_prompt: "red", tome_ratio: 0 };
  const read = readLink(linkOf(settings));
  assert.deepEqual(check(read, MODEL).settings, settings);
  assert.deepEqual(readLink("#steps=9&x=<script>&__proto__=1"), { steps: "9" });
  assert.ok(!linkOf(SETTINGS).includes("negative_prompt") && linkOf(SETTINGS).includes("tome_ratio=0.5"));
});

test("images of one key differ in their ratio only", () => {
  const key = keyOf(SETTINGS, 1, null);
  assert.equal(keyOf({ ...SETTINGS, tome_ratio: 0 }, 1, null), key);
  for (const other of [keyOf({ ...SETTINGS, seed: 8 }, 1, null), keyOf(SETTINGS, 2, null), keyOf(SETTINGS, 1, "image")]) {
    assert.notEqual(other, key);
  }
  assert.notEqual(nameOf("ab"), nameOf("ba"));
});

test("settings in files: a PNG of the server, a JSON of the page", () => {
  const made = JSON.parse(readFileSync("made.json", "utf-8"));
  const read = readFile(readFileSync("made.png"));
  assert.deepEqual(read, made);
  const encode = (value) => new TextEncoder().encode(value);
  assert.deepEqual(readFile(encode(JSON.stringify({ model: "x", ...SETTINGS, images: [] }))), SETTINGS);
  for (const text of ["", "{", "null", "3", "[]", '{"prompt": 3}', "\x89PNG"]) assert.equal(readFile(encode(text)), null, text);
  assert.equal(readFile(readFileSync("other.png")), null);
  assert.equal(readFile(readFileSync("made.png").subarray(0, 60)), null, "cut off");
});
