import assert from "node:assert/strict";
import test from "node:test";
import { againOf, allOf, pairOf, planOf, runImages, shareOf, withTimes } from "./page/run.js";

const EXPORTED = [0.5, 0.25, 0.75, 0];

test("only what is missing is generated, plain first", () => {
  assert.deepEqual(planOf(pairOf(0.5), EXPORTED, {}), [0, 0.5]);
  assert.deepEqual(planOf(pairOf(0.75), EXPORTED, { 0: {}, 0.5: {} }), [0.75]);
  assert.deepEqual(planOf(pairOf(0.5), EXPORTED, { 0: {}, 0.5: {} }), []);
  assert.deepEqual(planOf(allOf(EXPORTED), EXPORTED, { 0.5: {} }), [0, 0.25, 0.75]);
  assert.deepEqual(planOf(pairOf(0.5), [0.5], {}), [0.5], "an export without plain");
  assert.deepEqual(planOf(pairOf(0), EXPORTED, {}), [0], "only plain");
  assert.deepEqual(againOf([0, 0.5], 3), [0, 0.5, 0, 0.5, 0, 0.5]);
});

function recorder(answers) {
  const log = [];
  const generate = async (ratio, onProgress) => {
    const answer = answers.shift();
    if (answer instanceof Error) throw answer;
    onProgress({ position: 0, step: 1, steps: 2 });
    return answer;
  };
  const onState = ({ ratio, step, wait }) => log.push(wait ? `wait ${wait}` : `${ratio} step ${step}`);
  return { log, generate, onState, onImage: (ratio, image) => log.push(`${ratio} is ${image}`) };
}

const error = (code, seconds) => Object.assign(new Error(code), { code, values: { seconds } });

test("each image is reported when it is there; an error ends the run and takes nothing back", async () => {
  const { log, ...run } = recorder(["a", error("interrupted")]);
  await assert.rejects(runImages({ ratios: [0, 0.5], sleep: assert.fail, ...run }), /interrupted/);
  assert.deepEqual(log, ["0 step 0", "0 step 1", "0 is a", "0.5 step 0"]);
});

test("a server that is not ready is asked again, until the run is cancelled", async () => {
  const waits = [];
  const { log, ...run } = recorder([error("unavailable", "7"), error("unavailable", "soon"), "a"]);
  await runImages({ ratios: [0.5], sleep: async (seconds) => waits.push(seconds), ...run });
  assert.deepEqual(waits, [7, 5]);
  assert.deepEqual(log, ["0.5 step 0", "wait 7", "0.5 step 0", "wait 5", "0.5 step 0", "0.5 step 1", "0.5 is a"]);
  const sleep = () => Promise.reject(new DOMException("", "AbortError"));
  await assert.rejects(runImages({ ratios: [0.5], sleep, ...recorder([error("unavailable", "1")]) }), { name: "AbortError" });
});

test("progress over all images", () => {
  assert.equal(shareOf({ index: 0, count: 2, step: 0, steps: 0 }), null);
  assert.equal(shareOf({ index: 0, count: 2, step: 5, steps: 10 }), 0.25);
  assert.equal(shareOf({ index: 1, count: 2, step: 0, steps: 0 }), 0.5);
});

test("the first step of each run is not counted, and later runs add to the times", () => {
  const first = withTimes(undefined, { seconds: 3, batch: 1, steps: [9, 1, 2], blob: "first" });
  assert.deepEqual([first.steps, first.runs], [[1, 2], 1]);
  const both = withTimes(first, { seconds: 4, batch: 2, steps: [8, 3], blob: "second" });
  assert.deepEqual([both.steps, both.runs, both.batch, both.blob, both.seconds], [[1, 2, 3], 2, 2, "first", 3]);
  assert.deepEqual(withTimes(undefined, { batch: 1, steps: [] }).steps, []);
});
