// A worker: its seats, the last step's budget, the KV blocks, and who came and went.

import { count, few, h, keep, mark, say, short, tint } from "./dom.js";

const NUM_MOVES = 10;
const NUM_FREE_SHOWN = 32;
const LETTERS = { f: "free", c: "cached", u: "used", s: "shared" };
const WORDS = { joined: "took", left: "left", preempted: "preempted," };

function percent(share) {
  return `${Math.max(0, Math.min(100, 100 * share)).toFixed(1)}%`;
}

class Seats {
  constructor(openJob, mine) {
    this.openJob = openJob;
    this.mine = mine;
    this.node = h("ol", { class: "seats" });
    this.rest = h("p", { class: "faint rest" });
  }

  show(worker) {
    const taken = new Map(worker.seats.map((seat) => [seat.number, seat]));
    const last = Math.max(0, ...taken.keys(), Math.min(worker.max_num_seqs, NUM_FREE_SHOWN));
    const numbers = Array.from({ length: last }, (_, place) => place + 1);
    const shown = numbers.map((number) => ({ number, seat: taken.get(number) ?? null }));
    keep(this.node, shown, ({ number }) => number, () => this.make(), (node, one) => this.update(node, one));
    const hidden = worker.max_num_seqs - last;
    say(this.rest, hidden > 0 ? `and ${count(hidden)} more free seats` : "");
  }

  make() {
    const parts = {
      number: h("span", { class: "number" }),
      job: h("span", { class: "job" }),
      phase: h("span", { class: "phase" }),
      tokens: h("span", { class: "tokens" }),
      rate: h("span", { class: "rate" }),
      done: h("i"),
    };
    const button = h(
      "button",
      { type: "button", class: "seat", onclick: () => button.job && this.openJob(button.job) },
      h("span", { class: "line" }, parts.number, parts.job, parts.phase),
      h("span", { class: "progress", "aria-hidden": "true" }, parts.done),
      h("span", { class: "line" }, parts.tokens, parts.rate),
    );
    const node = h("li", {}, button);
    Object.assign(node, { parts, button });
    return node;
  }

  update(node, { number, seat }) {
    const { parts, button } = node;
    say(parts.number, number);
    button.disabled = seat === null;
    const wasHere = button.job;
    button.job = seat?.job ?? null;
    if (seat === null) {
      mark(button, "class", "seat free");
      for (const name of ["phase", "tokens", "rate"]) say(parts[name], "");
      say(parts.job, "free");
      parts.done.style.width = "0";
      return;
    }
    const reads = seat.phase === "prefill";
    const known = seat.num_prompt_tokens + seat.num_output_tokens;
    const isNew = wasHere !== seat.job;
    mark(button, "class", `seat ${tint(seat.job)} ${seat.phase}${this.mine(seat.job) ? " mine" : ""}`);
    mark(button, "data-job", seat.job);
    if (isNew) {
      // Taking the seat is shown once, and only where motion is welcome.
      button.classList.add("fresh");
      setTimeout(() => button.classList.remove("fresh"), 900);
    }
    say(parts.job, seat.choice ? `${short(seat.job)} #${seat.choice}` : short(seat.job));
    say(parts.phase, seat.phase);
    say(parts.tokens, reads ? `${count(seat.num_computed_tokens)} of ${count(known)} read` : `${count(seat.num_output_tokens)} of ${count(seat.max_output_tokens)}`);
    say(parts.rate, reads || seat.tokens_per_s === null ? "" : `${few(seat.tokens_per_s)}/s`);
    parts.done.style.width = percent(reads ? seat.num_computed_tokens / Math.max(1, known) : seat.num_output_tokens / Math.max(1, seat.max_output_tokens));
  }
}

class Budget {
  constructor() {
    this.prefill = h("i", { class: "prefill" });
    this.decode = h("i", { class: "decode" });
    this.text = h("p", { class: "faint" });
    this.node = h("div", {}, h("h4", {}, "Token budget of the last step"), h("div", { class: "budget", "aria-hidden": "true" }, this.prefill, this.decode), this.text);
  }

  show(worker) {
    const whole = Math.max(1, worker.max_num_batched_tokens);
    this.prefill.style.width = percent(worker.num_prefill_tokens / whole);
    this.decode.style.width = percent(worker.num_decode_tokens / whole);
    const used = worker.num_prefill_tokens + worker.num_decode_tokens;
    say(this.text, `${count(worker.num_prefill_tokens)} prefill + ${count(worker.num_decode_tokens)} decode = ${count(used)} of ${count(whole)} tokens`);
  }
}

class Blocks {
  constructor() {
    this.cells = h("div", { class: "blocks", role: "img" });
    this.legend = h("ul", { class: "legend" });
    this.node = h("div", {}, h("h4", {}, "KV blocks"), this.cells, this.legend);
  }

  show(worker) {
    const numbers = {
      used: worker.num_blocks - worker.num_free_blocks - worker.num_shared_blocks,
      shared: worker.num_shared_blocks,
      cached: worker.num_cached_blocks,
      free: worker.num_free_blocks - worker.num_cached_blocks,
    };
    const letters = worker.blocks;
    while (this.cells.childElementCount > letters.length) this.cells.lastChild.remove();
    while (this.cells.childElementCount < letters.length) this.cells.append(h("i"));
    [...this.cells.children].forEach((cell, place) => mark(cell, "class", LETTERS[letters[place]] ?? "free"));
    const told = Object.entries(numbers).map(([name, number]) => `${count(number)} ${name}`);
    this.cells.classList.toggle("large", letters.length <= 160);
    mark(this.cells, "aria-label", `${count(worker.num_blocks)} KV blocks: ${told.join(", ")}`);
    keep(this.legend, Object.entries(numbers), ([name]) => name, ([name]) => h("li", {}, h("i", { class: name }), h("span")), (node, [name, number]) => say(node.lastChild, `${count(number)} ${name}`));
  }
}

class Moves {
  constructor(openJob) {
    this.openJob = openJob;
    this.list = h("ol", { class: "moves" });
    this.nobody = h("p", { class: "faint" }, "Nobody yet.");
    this.node = h("div", {}, h("h4", {}, "Who came and went"), this.nobody, this.list);
  }

  // A seat that was left in one step and taken in the next: that is what all of this is about.
  show(worker) {
    const moves = worker.moves.map((move, place) => ({
      ...move,
      key: `${move.step}/${move.kind}/${move.job}/${move.choice}`,
      isNext: move.kind === "joined" && worker.moves.slice(0, place).some((one) => one.kind !== "joined" && one.seat === move.seat && (one.kind === "left" ? one.step === move.step - 1 : one.step === move.step)),
    }));
    const shown = moves.slice(-NUM_MOVES).reverse();
    keep(this.list, shown, (move) => move.key, (move) => this.make(move), () => {});
    this.nobody.hidden = shown.length > 0;
  }

  make(move) {
    const where = move.seat ? `seat ${move.seat}` : "a seat";
    return h(
      "li",
      { class: `${move.kind}${move.isNext ? " next" : ""}`, "data-step": move.step, "data-seat": move.seat, "data-job": move.job },
      h("span", { class: "step" }, `step ${count(move.step)}`),
      h("button", { type: "button", class: `name ${tint(move.job)}`, onclick: () => this.openJob(move.job) }, short(move.job)),
      h("span", { class: "did" }, `${WORDS[move.kind]} ${where}`),
      move.isNext ? h("span", { class: "chip", title: "Somebody sat there until the step before" }, "next step") : null,
    );
  }
}

export class WorkerCard {
  constructor(openJob, mine) {
    this.title = h("h3");
    this.facts = h("p", { class: "faint" });
    this.seats = new Seats(openJob, mine);
    this.parts = [this.seats, new Budget(), new Blocks(), new Moves(openJob)];
    const [, budget, blocks, moves] = this.parts;
    this.node = h(
      "article",
      { class: "card worker" },
      h("header", {}, this.title, this.facts),
      h("div", { class: "inside" }, h("div", { class: "main-part" }, this.seats.node, this.seats.rest, h("div", { class: "pair-inside" }, budget.node, blocks.node)), moves.node),
    );
  }

  show(worker) {
    say(this.title, `Worker ${worker.id}`);
    mark(this.node, "data-state", worker.state);
    const waits = worker.num_waiting ? `, ${count(worker.num_waiting)} on board without a seat` : "";
    say(this.facts, `${worker.state} · step ${count(worker.step)} · ${worker.seats.length} of ${worker.max_num_seqs} seats taken${waits} · ${few(worker.tokens_per_s)} tokens/s`);
    for (const part of this.parts) part.show(worker);
  }
}
