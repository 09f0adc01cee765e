// Dead letters: why they were given up on, and a button that gives them another life. For admins.

import { clock, h, keep, say } from "./dom.js";
import { ask } from "./stream.js";

export class DeadLetters {
  constructor(root, you, openJob, report) {
    this.root = root;
    this.you = you;
    this.openJob = openJob;
    this.report = report;
    this.number = null;
    this.note = h("p", { class: "faint" }, "None.");
    this.list = h("ul", { class: "dead" });
    root.replaceChildren(this.note, this.list);
  }

  // Asked for only when their number has changed.
  async show(queues) {
    const signature = JSON.stringify([queues.map((queue) => queue.dead), this.you().scopes]);
    if (signature === this.number) return;
    this.number = signature;
    const number = queues.reduce((sum, queue) => sum + queue.dead, 0);
    if (!number) return this.fill([], "None.");
    if (!this.you().scopes.includes("admin")) return this.fill([], `${number}. A key with the scope admin sees and requeues them.`);
    try {
      this.fill((await ask("GET", "v1/admin/dead")).data, "");
    } catch (error) {
      this.fill([], error.message);
    }
  }

  fill(letters, note) {
    say(this.note, note);
    this.note.hidden = !note;
    keep(this.list, letters, (one) => one.entry_id, (one) => this.make(one), () => {});
  }

  make(letter) {
    const error = letter.error?.message ?? letter.error?.code ?? letter.error ?? "";
    const button = h("button", { type: "button", disabled: !letter.id, "aria-label": `requeue ${letter.id}`, onclick: () => this.requeue(letter.id, button) }, "Requeue");
    return h(
      "li",
      {},
      h("div", {},
        h("button", { type: "button", class: "link", disabled: !letter.id, onclick: () => this.openJob(letter.id) }, letter.id ?? letter.entry_id),
        h("p", { class: "faint" }, `${letter.reason} at ${clock(letter.buried_at)}, ${letter.num_tokens} tokens${error ? `: ${error}` : ""}`)),
      button,
    );
  }

  async requeue(id, button) {
    button.disabled = true;
    try {
      const { requeued_as: anew } = await ask("POST", "v1/admin/dead/requeue", { id });
      button.closest("li").remove();
      this.report(`Queued anew as ${anew}.`);
    } catch (error) {
      button.disabled = false;
      this.report(error.message);
    }
  }
}
