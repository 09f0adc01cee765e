// <jitney-lockstep>: seats over time, several engines side by side on one clock. Plays, pauses, steps.
//
// A timeline is what worker/jitney_worker/simulate/animation.py writes:
//   {title, facts, step_s, colours: [css], jobs: [{name, colour, arrival, gone, tokens}],
//    lanes: [{name, about, seats, steps, stays: [{job, seat, start, word, end, free, last, preempted}]}]}
// Steps are counted as completed ones: a stay computes from `start` to `end`, says a token in every step after `word`,
// and its seat is free from `free` on. `last`: the job ended with it. `gone`: when a job left that had no seat, or null.
//
// The timeline comes from a child <script type="application/json">, from the file that `src` names, or from
// `element.timeline = {...}`. Needs lockstep.css, and nothing else.
(() => {
  "use strict";

  const SPEEDS = [2, 5, 20, 60, 200];
  const WHOLE_RUN_S = 45; // the speed to begin with plays everything in about so long
  const CALM_MS = 900; // where motion is unwelcome: from move to move, so often
  const MAX_CHIPS = 24;

  const ICONS = {
    start: "M4 4h2v12H4zM17 4v12L7 10z",
    back: "M14 4v12L5 10z",
    play: "M5 3v14l12-7z",
    pause: "M5 3h4v14H5zM11 3h4v14h-4z",
    on: "M6 4v12l9-6z",
    move: "M3 4v12l10-6zM14 4h2v12h-2z",
  };

  const count = (number) => number.toLocaleString("en");
  const between = (low, value, high) => Math.max(low, Math.min(value, high));

  function make(tag, properties = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name === "class") node.className = value;
      else if (name.includes("-") || name === "role") node.setAttribute(name, value);
      else node[name] = value;
    }
    node.append(...children);
    return node;
  }

  function icon(name) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    svg.setAttribute("viewBox", "0 0 20 20");
    svg.setAttribute("aria-hidden", "true");
    path.setAttribute("d", ICONS[name]);
    svg.append(path);
    return svg;
  }

  // What a lane has come to after each number of completed steps, as arrays: a frame of the animation only looks up.
  function history(lane, jobs) {
    const { steps, seats } = lane;
    const fresh = () => new Int32Array(steps + 2);
    const [busy, saying, waiting, done] = [fresh(), fresh(), fresh(), fresh()];
    const add = (array, step, number) => (array[Math.min(step, steps + 1)] += number);
    for (const job of jobs) {
      add(waiting, job.arrival, 1);
      if (job.gone !== null) add(waiting, job.gone, -1);
    }
    for (const stay of lane.stays) {
      add(busy, stay.start, 1), add(busy, stay.end, -1);
      add(saying, stay.word, 1), add(saying, stay.end, -1);
      add(waiting, stay.start, -1);
      add(stay.last ? done : waiting, stay.end, 1);
    }
    const [tokens, idle, wasted] = [fresh(), fresh(), fresh()];
    for (let step = 1; step <= steps; step += 1) {
      // What is computed in this step was decided when one less was completed.
      tokens[step] = tokens[step - 1] + saying[step - 1];
      idle[step] = idle[step - 1] + seats - busy[step - 1];
      wasted[step] = wasted[step - 1] + (waiting[step - 1] ? seats - busy[step - 1] : 0);
      for (const array of [busy, saying, waiting, done]) array[step] += array[step - 1];
    }
    return { busy, waiting, done, tokens, idle, wasted };
  }

  const FIGURES = [
    ["busy", "seats computing"],
    ["tokens", "tokens so far"],
    ["done", "jobs finished"],
    ["waiting", "jobs waiting"],
    ["idle", "idle seat-steps"],
    ["wasted", "idle while jobs wait"],
  ];

  class Lane {
    constructor(lane, timeline, total) {
      Object.assign(this, { lane, timeline, total });
      this.history = history(lane, timeline.jobs);
      this.figures = Object.fromEntries(FIGURES.map(([name]) => [name, make("dd")]));
      this.chips = [];
      this.waits = make("p", { class: "waits" });
      const pairs = FIGURES.map(([name, words]) => make("div", { class: name }, make("dt", {}, words), this.figures[name]));
      const rows = Array.from({ length: lane.seats }, (_, seat) => this.row(seat));
      this.node = make(
        "section",
        { class: "lane", "aria-label": lane.name },
        make("header", {}, make("h3", {}, lane.name, make("small", {}, lane.about)), make("dl", {}, ...pairs)),
        make("div", { class: "seats" }, ...rows),
        this.waits,
      );
    }

    row(seat) {
      const chip = make("span", { class: "chip" });
      const track = make("div", { class: "track", "aria-hidden": "true" });
      const played = make("div", { class: "played" });
      const idle = make("div", { class: "bar idle" });
      idle.style.width = this.share(this.lane.steps);
      played.append(idle);
      for (const stay of this.lane.stays) if (stay.seat === seat) played.append(...this.bars(stay));
      track.append(played);
      this.chips.push(chip);
      return make("div", { class: "seat" }, make("span", { class: "number" }, `${seat + 1}`), chip, track);
    }

    bars(stay) {
      const bar = (kind, start, end) => {
        const node = make("div", { class: `bar ${kind}` });
        node.style.left = this.share(start);
        node.style.width = this.share(end - start);
        node.style.setProperty("--job", this.colour(stay.job));
        return node;
      };
      const bars = [bar("computes", stay.start, stay.end)];
      if (stay.word > stay.start) bars.push(bar("reads", stay.start, stay.word));
      if (stay.free > stay.end) bars.push(bar("held", stay.end, stay.free));
      if (stay.preempted) bars.push(bar("preempted", stay.end, stay.end));
      return bars;
    }

    colour(job) {
      return this.timeline.colours[this.timeline.jobs[job].colour];
    }

    share(steps) {
      return `${(100 * steps) / this.total}%`;
    }

    // Show the lane when `at` steps are completed. A lane that has ended stays as it was then.
    show(at) {
      const { lane, history, figures } = this;
      const { jobs } = this.timeline;
      const now = Math.min(at, lane.steps);
      figures.busy.textContent = at < lane.steps ? `${history.busy[now]} of ${lane.seats}` : `over at ${count(lane.steps)}`;
      figures.done.textContent = `${history.done[now]} of ${jobs.length}`;
      for (const name of ["tokens", "waiting", "idle", "wasted"]) figures[name].textContent = count(history[name][now]);
      this.node.classList.toggle("over", at >= lane.steps);
      this.node.classList.toggle("wastes", history.wasted[now] > 0);
      const seats = new Array(lane.seats).fill(null);
      const gone = new Set();
      for (const stay of lane.stays) {
        if (stay.start <= now && now < stay.free) seats[stay.seat] = stay;
        if (stay.start <= now && (now < stay.end || stay.last)) gone.add(stay.job);
      }
      seats.forEach((stay, seat) => this.showSeat(this.chips[seat], stay, now));
      const waits = (job, index) => job.arrival <= now && !(job.gone !== null && job.gone <= now) && !gone.has(index);
      this.showWaiting(jobs.map((job, index) => (waits(job, index) ? index : -1)).filter((index) => index >= 0));
      this.node.style.setProperty("--at", this.share(now));
      return { tokens: history.tokens[now], done: history.done[now], idle: history.idle[now], wasted: history.wasted[now] };
    }

    showSeat(chip, stay, now) {
      const kind = !stay ? "empty" : now >= stay.end ? "held" : now < stay.word ? "reads" : "computes";
      chip.className = `chip ${kind}`;
      if (!stay) {
        chip.textContent = "empty";
        return;
      }
      const job = this.timeline.jobs[stay.job];
      chip.style.setProperty("--job", this.colour(stay.job));
      if (kind === "held") {
        chip.replaceChildren(make("b", {}, job.name), " ended");
        return;
      }
      let said = 0;
      for (const one of this.lane.stays)
        if (one.job === stay.job) said += between(0, now - one.word, one.end - one.word);
      chip.style.setProperty("--done", `${(100 * said) / job.tokens}%`);
      chip.replaceChildren(make("b", {}, job.name), ` ${said}/${job.tokens}`);
    }

    showWaiting(waiting) {
      const key = waiting.join(" ");
      if (this.shown === key) return;
      this.shown = key;
      const chips = waiting.slice(0, MAX_CHIPS).map((index) => {
        const chip = make("span", { class: "small" }, this.timeline.jobs[index].name);
        chip.style.setProperty("--job", this.colour(index));
        return chip;
      });
      const more = waiting.length > MAX_CHIPS ? [`and ${count(waiting.length - MAX_CHIPS)} more`] : [];
      const words = waiting.length ? "waiting" : "nobody waits";
      this.waits.replaceChildren(make("span", { class: "label" }, words), ...chips, ...more);
    }
  }

  class Lockstep extends HTMLElement {
    #at = 0;
    #frame = 0;
    #timer = 0;
    #timeline = null;

    connectedCallback() {
      if (this.#timeline) return;
      const inline = this.querySelector('script[type="application/json"]');
      if (inline) this.timeline = JSON.parse(inline.textContent);
      else if (this.hasAttribute("src"))
        fetch(this.getAttribute("src"))
          .then((answer) => answer.json())
          .then((timeline) => (this.timeline = timeline))
          .catch(() => (this.textContent = "The run could not be loaded."));
    }

    disconnectedCallback() {
      this.pause();
    }

    get timeline() {
      return this.#timeline;
    }

    set timeline(timeline) {
      this.pause();
      this.#timeline = timeline;
      this.total = Math.max(...timeline.lanes.map((lane) => lane.steps));
      this.lanes = timeline.lanes.map((lane) => new Lane(lane, timeline, this.total));
      this.moves = this.#moves();
      this.replaceChildren(this.#controls(), ...this.lanes.map((lane) => lane.node), this.#legend());
      this.setAttribute("role", "group");
      this.setAttribute("aria-label", `${timeline.title}, playable`);
      this.onkeydown = (event) => this.#key(event);
      this.at = 0;
    }

    // Steps completed.
    get at() {
      return this.#at;
    }

    set at(step) {
      this.#at = between(0, Math.floor(step), this.total);
      const seconds = this.#timeline.step_s ? `, ${(this.#at * this.#timeline.step_s).toFixed(1)} s` : "";
      this.readout.textContent = `step ${count(this.#at)} of ${count(this.total)}${seconds}`;
      this.slider.value = this.#at;
      this.slider.setAttribute("aria-valuetext", this.readout.textContent);
      const standings = this.lanes.map((lane) => lane.show(this.#at));
      if (!this.isPlaying) this.#tell(standings);
    }

    get isPlaying() {
      return this.#frame !== 0 || this.#timer !== 0;
    }

    play() {
      if (this.isPlaying) return;
      if (this.#at >= this.total) this.at = 0;
      if (matchMedia("(prefers-reduced-motion: reduce)").matches) this.#playCalmly();
      else this.#playSmoothly();
      this.#showPlaying();
    }

    pause() {
      cancelAnimationFrame(this.#frame);
      clearInterval(this.#timer);
      const wasPlaying = this.isPlaying;
      this.#frame = this.#timer = 0;
      if (wasPlaying) {
        this.#showPlaying();
        this.at = this.#at;
      }
    }

    toggle() {
      if (this.isPlaying) this.pause();
      else this.play();
    }

    // To the next step in which somebody takes or leaves a seat.
    nextMove() {
      this.at = this.moves.find((step) => step > this.#at) ?? this.total;
    }

    #playSmoothly() {
      let before = performance.now();
      let due = this.#at;
      const frame = (now) => {
        due += (Math.min(now - before, 250) / 1000) * Number(this.speed.value);
        before = now;
        if (Math.floor(due) !== this.#at) this.at = due;
        this.#frame = requestAnimationFrame(frame);
        if (this.#at >= this.total) this.pause();
      };
      this.#frame = requestAnimationFrame(frame);
    }

    #playCalmly() {
      this.#timer = setInterval(() => {
        this.nextMove();
        if (this.#at >= this.total) this.pause();
      }, CALM_MS);
    }

    #moves() {
      const steps = this.#timeline.lanes.flatMap((lane) => lane.stays.flatMap((stay) => [stay.start, stay.end, stay.free]));
      return [...new Set(steps)].sort((one, other) => one - other);
    }

    #controls() {
      const button = (name, symbol, act) =>
        make("button", { type: "button", title: name, "aria-label": name, onclick: act }, icon(symbol));
      const stop = (act) => () => {
        this.pause();
        act();
      };
      this.playButton = button("play", "play", () => this.toggle());
      this.playButton.classList.add("play");
      this.slider = make("input", { type: "range", min: 0, max: this.total, value: 0, "aria-label": "step" });
      this.slider.oninput = () => {
        this.pause();
        this.at = Number(this.slider.value);
      };
      this.speed = make("select", { "aria-label": "speed" });
      const first = SPEEDS.find((speed) => this.total / speed <= WHOLE_RUN_S) ?? SPEEDS.at(-1);
      for (const speed of SPEEDS)
        this.speed.append(make("option", { value: speed, selected: speed === first }, `${speed} steps/s`));
      this.readout = make("output", { class: "readout" });
      this.told = make("p", { class: "told", "aria-live": "polite" });
      return make(
        "div",
        { class: "controls" },
        make(
          "div",
          { class: "buttons", role: "group", "aria-label": "player" },
          button("back to the start", "start", stop(() => (this.at = 0))),
          button("one step back", "back", stop(() => (this.at = this.#at - 1))),
          this.playButton,
          button("one step on", "on", stop(() => (this.at = this.#at + 1))),
          button("on to the next move", "move", stop(() => this.nextMove())),
          this.speed,
          this.readout,
        ),
        this.slider,
        this.told,
      );
    }

    #legend() {
      const stays = this.#timeline.lanes.flatMap((lane) => lane.stays);
      const entry = (kind, words) => make("span", {}, make("i", { class: `bar ${kind}` }), words);
      const legend = make("p", { class: "legend" }, entry("computes", "computing"));
      if (stays.some((stay) => stay.word > stay.start)) legend.append(entry("reads", "reading its prompt, or what it lost"));
      if (stays.some((stay) => stay.free > stay.end)) legend.append(entry("held", "ended, seat held"));
      if (stays.some((stay) => stay.preempted)) legend.append(entry("preempted", "preempted"));
      legend.append(entry("idle", "idle"));
      const keys = make("span", { class: "keys" }, "Keys: space plays, ← and → step, N goes to the next move.");
      legend.append(keys);
      return legend;
    }

    #showPlaying() {
      const name = this.isPlaying ? "pause" : "play";
      this.playButton.title = name;
      this.playButton.setAttribute("aria-label", name);
      this.playButton.replaceChildren(icon(name));
    }

    // For who does not see the seats, and for who wants it in a sentence. Not while it plays: that would be noise.
    #tell(standings) {
      const parts = standings.map((now, index) => {
        const { name } = this.#timeline.lanes[index];
        return `${name} ${count(now.tokens)} tokens, ${now.done} finished, ${count(now.idle)} seat-steps idle, ${count(now.wasted)} of them while jobs waited`;
      });
      this.told.textContent = `After ${count(this.#at)} ${this.#at === 1 ? "step" : "steps"}: ${parts.join("; ")}.`;
    }

    #key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const { tagName } = event.target;
      const isOwn = tagName === "SELECT" || tagName === "INPUT" || (tagName === "BUTTON" && event.key === " ");
      const acts = {
        " ": () => this.toggle(),
        ArrowRight: () => (this.pause(), (this.at = this.#at + 1)),
        ArrowLeft: () => (this.pause(), (this.at = this.#at - 1)),
        n: () => (this.pause(), this.nextMove()),
      };
      const act = acts[event.key] ?? acts[event.key.toLowerCase()];
      if (!act || (isOwn && !(tagName === "INPUT" && (event.key === " " || event.key.toLowerCase() === "n")))) return;
      event.preventDefault();
      act();
    }
  }

  customElements.define("jitney-lockstep", Lockstep);
})();
