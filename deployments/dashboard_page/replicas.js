// Replica by replica: a map of all of them, and a table of which one page is there at a time; the unwell come first.

const ROWS_MAX = matchMedia("(max-width: 46rem)").matches ? 10 : 25;
const MAP_FROM = 12;
const HEALTH_OF = { ready: "good", starting: "warn", draining: "warn", stuck: "bad" };

function healthOf(r) {
  if (!r.fresh) return ["silent", "bad"];
  if (r.ejected_by) return ["left alone", "bad"];
  if (r.retired) return ["retired", "warn"];
  if (r.warm && r.state === "ready") return ["warm", "good"];
  return [r.state, HEALTH_OF[r.state] ?? "warn"];
}

const RANKS = { bad: 0, warn: 1, good: 2 };
const loadOf = (r) => (r.running_seqs_max ? (r.running + r.waiting) / r.running_seqs_max : null);
const knobWords = (r) => [r.running_seqs_max, r.step_tokens_max, r.speculative_depth].map((v) => v ?? NONE).join(" / ");

// Title, value that is sorted by, and [text, bar] to show.
const FIELDS = [
  ["Replica", (r) => r.id, (r) => [r.id]],
  ["Health", (r) => RANKS[healthOf(r)[1]] + healthOf(r)[0], (r) => [healthOf(r)[0]]],
  ["Load", loadOf, (r) => [`${r.running}${r.waiting ? ` + ${r.waiting} wait` : ""}`, loadOf(r)]],
  ["KV cache", (r) => r.kv_share, (r) => [share(r.kv_share), r.kv_share]],
  ["Prefix hits", (r) => r.hit_share, (r) => [share(r.hit_share)]],
  ["Prompt tok/s", (r) => r.prefill_tps, (r) => [num(r.prefill_tps)]],
  ["Output tok/s", (r) => r.decode_tps, (r) => [num(r.decode_tps)]],
  ["Token gap", (r) => r.itl_ms, (r) => [ms(r.itl_ms)]],
  ["Busy", (r) => r.busy_share, (r) => [share(r.busy_share) + (r.bound && r.bound !== "unknown" ? `, ${r.bound}` : "")]],
  ["Seqs / tokens / depth", (r) => r.step_tokens_max, (r) => [knobWords(r)]],
  ["Heard", (r) => r.age_s, (r) => [`${span(r.age_s)} ago`]],
];

class Replicas {
  constructor() {
    this.rows = new Map();
    this.dots = new Map();
    this.sortBy = 1;
    this.down = false;
    this.page = 0;
    this.all = [];
    this.body = $("replicas").tBodies[0];
    $("replicas").tHead.rows[0].append(...FIELDS.map(([title], i) =>
      el("th", { role: "columnheader", scope: "col" }, el("button", { type: "button", onclick: () => this.sort(i) }, title))));
    $("find").addEventListener("input", () => { this.page = 0; this.show(); });
    $("page-back").addEventListener("click", () => { this.page -= 1; this.show(); });
    $("page-on").addEventListener("click", () => { this.page += 1; this.show(); });
    $("heat").addEventListener("click", (event) => {
      const id = event.target.dataset?.id;
      if (id) { $("find").value = id; this.page = 0; this.show(); }
    });
  }

  sort(field) {
    this.down = this.sortBy === field ? !this.down : field > 1;
    this.sortBy = field;
    this.page = 0;
    this.show();
  }

  take(overview) {
    const names = overview.columns;
    this.all = overview.replicas.map((row) => Object.fromEntries(names.map((name, i) => [name, row[i]])));
    this.unknown = overview.unknown_replicas;
    this.show();
  }

  show() {
    const wanted = $("find").value.trim().toLowerCase();
    const match = (r) => !wanted || [r.id, healthOf(r)[0], r.bound].some((text) => String(text).toLowerCase().includes(wanted));
    const value = FIELDS[this.sortBy][1], way = this.down ? -1 : 1;
    const rank = (r) => value(r) ?? -Infinity;
    const found = this.all.filter(match).sort((a, b) => {
      const [one, two] = [rank(a), rank(b)];
      return one === two ? (a.id < b.id ? -1 : 1) : (one < two ? -way : way);
    });
    const pages = Math.max(1, Math.ceil(found.length / ROWS_MAX));
    this.page = Math.min(Math.max(0, this.page), pages - 1);
    const shown = found.slice(this.page * ROWS_MAX, (this.page + 1) * ROWS_MAX);
    this.table(shown);
    this.map();
    const states = {};
    for (const r of this.all) states[healthOf(r)[0]] = (states[healthOf(r)[0]] ?? 0) + 1;
    const words = Object.entries(states).map(([state, count]) => `${count} ${state}`).join(", ");
    say($("replica-words"), (words || "none is known") + (this.unknown > (states.silent ?? 0) ? `, ${this.unknown} run and say nothing` : ""));
    dress($("heat"), "aria-label", `Map of ${this.all.length} replicas: ${words}. The table below has the same in figures.`);
    $("pager").hidden = pages < 2;
    const first = this.page * ROWS_MAX;
    say($("page-words"), `${first + 1} to ${first + shown.length} of ${found.length}`);
    $("page-back").disabled = this.page === 0;
    $("page-on").disabled = this.page === pages - 1;
    [...$("replicas").tHead.rows[0].cells].forEach((cell, i) =>
      dress(cell, "aria-sort", i === this.sortBy ? (this.down ? "descending" : "ascending") : "none"));
  }

  table(shown) {
    const rows = shown.map((r) => this.row(r));
    const kept = new Set(shown.map((r) => r.id));
    for (const id of this.rows.keys()) if (!kept.has(id)) { this.rows.get(id).node.remove(); this.rows.delete(id); }
    rows.forEach((row, i) => { if (this.body.rows[i] !== row) this.body.insertBefore(row, this.body.rows[i] ?? null); });
  }

  row(r) {
    let row = this.rows.get(r.id);
    if (row === undefined) {
      const cells = FIELDS.map(([title, , show]) => {
        const bar = show(r).length > 1 ? el("span", { class: "meter" }) : null;
        const text = el("span", {});
        return { node: el("td", { role: "cell", "data-name": title }, bar, text), text, bar };
      });
      row = { node: el("tr", { role: "row" }, ...cells.map((cell) => cell.node)), cells };
      this.rows.set(r.id, row);
    }
    FIELDS.forEach(([, , show], i) => {
      const [text, bar] = show(r), cell = row.cells[i];
      say(cell.text, text);
      if (cell.bar) setBar(cell.bar, bar);
    });
    dress(row.cells[1].text, "class", `state ${healthOf(r)[1]}`);
    return row.node;
  }

  map() {
    const heat = $("heat");
    heat.hidden = this.all.length < MAP_FROM;
    if (heat.hidden) return;
    const kept = new Set(this.all.map((r) => r.id));
    for (const [id, dot] of this.dots) if (!kept.has(id)) { dot.remove(); this.dots.delete(id); }
    this.all.forEach((r, i) => {
      let dot = this.dots.get(r.id);
      if (dot === undefined) this.dots.set(r.id, dot = el("i", { "data-id": r.id }));
      if (heat.children[i] !== dot) heat.insertBefore(dot, heat.children[i] ?? null);
      const [words, kind] = healthOf(r);
      dress(dot, "class", kind === "good" ? "" : kind);
      dress(dot, "title", `${r.id}: ${words}, ${r.running} running`);
      setBar(dot, loadOf(r));
    });
  }
}

function setBar(node, value) {
  const text = Math.min(1, Math.max(0, value ?? 0)).toFixed(2);
  if (node.barValue === text) return;
  node.barValue = text;
  node.style.setProperty("--v", text);
  if (node.className.startsWith("meter")) node.className = value > 0.9 ? "meter hot" : "meter";
}
