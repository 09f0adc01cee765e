// A job's own page: its timeline, and for an admin its words and the button that ends it.

import { clock, count, h, say, seconds } from "./dom.js";
import { ask } from "./stream.js";

const EVERY_MS = 1000;
const ENDED = ["finished", "failed", "cancelled", "expired"];

const TELL = {
  queued: (one) => `queued, ${one.band}`,
  claimed: () => "claimed by a worker",
  prefill: (one) => `prefill: ${count(one.prompt_tokens ?? 0)} prompt tokens, ${count(one.cached_tokens ?? 0)} of them from the cache`,
  "handed over": (one) => `handed over to attempt ${one.attempt}: ${count(one.resumed_tokens ?? 0)} tokens kept, read again`,
  joined: (one) => `took seat ${one.seat || "?"} at step ${count(one.step)} of ${one.worker}`,
  preempted: (one) => `preempted at step ${count(one.step)}: seat ${one.seat || "?"} and its blocks went to an earlier job`,
  left: (one) => `left seat ${one.seat || "?"} after step ${count(one.step)}`,
  finished: (one) => `finished with ${count(one.num_tokens)} tokens${one.reasons?.length ? ` (${one.reasons.join(", ")})` : ""}`,
  failed: (one) => `failed after ${count(one.num_tokens)} tokens`,
  cancelled: (one) => `cancelled after ${count(one.num_tokens)} tokens`,
  expired: (one) => `expired after ${count(one.num_tokens)} tokens`,
};

export class JobPage {
  constructor(dialog, you, report) {
    this.dialog = dialog;
    this.title = dialog.querySelector("h2");
    this.body = dialog.querySelector("#job-body");
    this.you = you;
    this.report = report;
    this.id = null;
    dialog.addEventListener("close", () => this.closed());
    window.addEventListener("hashchange", () => this.fromHash());
  }

  fromHash() {
    const id = location.hash.startsWith("#job=") ? decodeURIComponent(location.hash.slice(5)) : null;
    if (id && id !== this.id) this.open(id);
    else if (!id && this.dialog.open) this.dialog.close();
  }

  open(id) {
    this.id = id;
    if (location.hash !== `#job=${id}`) history.pushState(null, "", `#job=${encodeURIComponent(id)}`);
    say(this.title, `Job ${id}`);
    this.state = h("p", { class: "job-state", role: "status" }, "looking");
    this.list = h("ol", { class: "timeline" });
    this.words = h("div", { class: "words" });
    this.cancel = h("button", { type: "button", class: "danger", hidden: true, onclick: () => this.end() }, "Cancel this job");
    this.body.replaceChildren(this.state, this.list, this.words, h("div", { class: "row" }, h("span", { class: "push" }), this.cancel));
    if (!this.dialog.open) this.dialog.showModal();
    this.look(id);
  }

  closed() {
    this.id = null;
    clearTimeout(this.timer);
    if (location.hash.startsWith("#job=")) history.pushState(null, "", location.pathname + location.search);
  }

  get isAdmin() {
    return this.you().scopes.includes("admin");
  }

  async look(id) {
    clearTimeout(this.timer);
    try {
      const path = encodeURIComponent(id);
      const job = await ask("GET", this.isAdmin ? `v1/admin/jobs/${path}` : `v1/jobs/${path}/timeline`);
      if (this.id === id) this.show(job);
    } catch (error) {
      if (this.id === id) say(this.state, error.message);
    }
  }

  show(job) {
    const hasEnded = ENDED.includes(job.status);
    const seat = job.seats[0];
    const now = hasEnded ? "" : seat ? `, ${seat.phase} in seat ${seat.number}` : "";
    say(this.state, `${job.status}${now} · ${count(job.num_tokens)} tokens · ${job.band} · tenant ${job.tenant} · attempt ${Math.max(1, job.attempts)}`);
    const begin = job.created_at;
    const entries = job.entries.map((one) => ({ ...one, told: (TELL[one.what] ?? (() => one.what))(one) }));
    const signature = JSON.stringify(entries);
    if (signature !== this.signature || !this.list.childElementCount) {
      this.signature = signature;
      this.list.replaceChildren(...entries.map((one) => this.entry(one, begin)));
    }
    this.cancel.hidden = hasEnded || !this.isAdmin;
    this.say(job);
    if (!hasEnded) this.timer = setTimeout(() => this.look(job.id), EVERY_MS);
  }

  entry(one, begin) {
    const at = one.at === null ? "" : one.what === "queued" ? clock(one.at) : `+${seconds(Math.max(0, one.at - begin))}`;
    return h("li", { class: one.what.replace(" ", "-"), "data-what": one.what }, h("span", { class: "at" }, at), h("span", {}, one.told));
  }

  say(job) {
    if (job.texts === undefined) {
      say(this.words, "What it was asked and what it said is shown to keys with the scope admin.");
      return;
    }
    const parts = [["Prompt", job.prompt ?? "not kept any more"], ...job.texts.map((text, place) => [job.texts.length > 1 ? `Answer ${place}` : "Answer", text])];
    if (job.error) parts.push(["Error", `${job.error.code ?? ""} ${job.error.message ?? ""}`]);
    while (this.words.childElementCount > 2 * parts.length) this.words.lastChild.remove();
    parts.forEach(([name, text], place) => {
      if (!this.words.children[2 * place]) this.words.append(h("h3"), h("pre", { tabindex: "0" }));
      say(this.words.children[2 * place], name);
      mark(this.words.children[2 * place + 1], name);
      say(this.words.children[2 * place + 1], text);
    });
  }

  async end() {
    this.cancel.disabled = true;
    try {
      await ask("DELETE", `v1/admin/jobs/${encodeURIComponent(this.id)}`);
      this.report("The job was cancelled.");
      await this.look(this.id);
    } catch (error) {
      say(this.state, error.message);
    }
    this.cancel.disabled = false;
  }
}

function mark(node, name) {
  node.setAttribute("aria-label", name);
  node.setAttribute("role", "region");
}
