import assert from "node:assert/strict";
import test from "node:test";
import { eventReader } from "./page/events.js";

const TEXT = 'event: a\ndata: {"type":"a","text":"狐 \\n"}\n\nevent: b\ndata: {"type":"b"}\n\n: a comment\n\ndata: {"ty';

for (const size of [1, 7, 20, 1000]) {
  test(`events of a text that grows by ${size} characters, each once; one without its end is not one`, () => {
    const read = eventReader();
    const events = [];
    for (let end = size; end < TEXT.length + size; end += size) events.push(...read(TEXT.slice(0, end)));
    assert.deepEqual(events, [{ type: "a", text: "狐 \n" }, { type: "b" }]);
    assert.deepEqual(read(TEXT), []);
  });
}
