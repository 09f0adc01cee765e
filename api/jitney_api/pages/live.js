// The page: follows the overview, and hands each look to those who show a part of it.

import { AskBox } from "./ask.js";
import { DeadLetters } from "./dead.js";
import { keep, say } from "./dom.js";
import { JobPage } from "./job.js";
import { QueueSection } from "./queue.js";
import { follow, key } from "./stream.js";

const $ = (selector) => document.querySelector(selector);
const QUIET_MS = 10_000;
const RETRY_MS = [500, 1000, 2000, 5000];

let you = { key: "", tenant: "-", scopes: [] };
let curves = {};
let attempt = 0;
let connection = null;

function report(text, kind = "live") {
  const state = $("#state");
  say(state, text);
  state.dataset.kind = kind;
}

// What somebody did is said for a while; then the connection speaks again.
let saidUntil = 0;
function tell(text) {
  report(text, "told");
  saidUntil = performance.now() + 4000;
}

const whoAmI = () => you;
const job = new JobPage($("#job"), whoAmI, tell);
const openJob = (id) => job.open(id);
const box = new AskBox(document, openJob);
const dead = new DeadLetters($("#dead"), whoAmI, openJob, tell);

const HEAR = {
  you(told) {
    you = told;
    job.fromHash();
  },
  curves(points) {
    curves = points;
  },
  trouble({ message }) {
    report(message, "trouble");
  },
  overview(overview) {
    if (performance.now() > saidUntil) report("live", "live");
    $("#nothing").hidden = true;
    const mine = (id) => id === box.job;
    keep($("#sections"), overview.queues, (queue) => queue.name, (queue) => {
      const section = new QueueSection(queue.name, curves[queue.name] ?? [], openJob, mine);
      section.node.section = section;
      return section.node;
    }, (node, queue) => node.section.show(queue, overview.at));
    if (!overview.queues.length) {
      say($("#nothing"), "No queue is known yet: start a worker with jitney worker, or everything with jitney up.");
      $("#nothing").hidden = false;
    }
    box.know(overview.queues);
    dead.show(overview.queues);
  },
};

async function watch() {
  connection?.abort();
  const mine = (connection = new AbortController());
  let timer = null;
  // The server speaks twice a second. A silence is a connection that nobody has told us is gone.
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(() => mine.abort(), QUIET_MS);
  };
  try {
    heard();
    await follow("v1/overview/events", (name, data) => {
      heard();
      attempt = 0;
      HEAR[name]?.(data);
    }, mine.signal);
  } catch (error) {
    if (connection !== mine) return;
    if (error.status === 401 || error.status === 403) {
      report(error.status === 401 ? "a key is needed" : "this key may not read", "trouble");
      return askForKey(error.message);
    }
  } finally {
    clearTimeout(timer);
  }
  if (connection !== mine) return;
  report("no connection; trying again", "trouble");
  setTimeout(watch, RETRY_MS[Math.min(attempt++, RETRY_MS.length - 1)]);
}

function askForKey(why) {
  say($("#keys-why"), why ?? "Kept in this tab until it is closed, and sent to this server alone.");
  $("#keys-secret").value = key.get();
  if (!$("#keys").open) $("#keys").showModal();
}

function useKey(secret) {
  key.set(secret);
  you = { key: "", tenant: "-", scopes: [] };
  $("#keys").close();
  attempt = 0;
  watch();
}

$("#queues").append(Object.assign(document.createElement("div"), { id: "sections" }));
$("#key").addEventListener("click", () => askForKey());
$("#keys-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("#keys-secret").value.trim());
});
$("#keys-forget").addEventListener("click", () => useKey(""));
for (const button of document.querySelectorAll("[data-close]")) {
  button.addEventListener("click", () => button.closest("dialog").close());
}
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
}
// A page in the background costs nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    connection?.abort();
    connection = null;
  } else if (!connection) watch();
});

watch();
