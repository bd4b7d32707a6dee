// Lines over the last five minutes. The page keeps the history itself: it begins when the page is opened.

const HISTORY_S = 300;
const SHORTEST_S = 60;
const SVG = "http://www.w3.org/2000/svg";

function svg(tag, props) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props)) node.setAttribute(name, value);
  return node;
}

class Chart {
  // `lines`: [{name, style, of(overview)}]; the last may be a goal, drawn level. `words` turns a value into text.
  constructor(title, lines, words) {
    this.lines = lines;
    this.words = words;
    this.points = [];
    this.legend = el("span", { class: "legend" });
    this.top = el("span", { class: "top" });
    this.low = el("span", { class: "low" });
    this.plot = svg("svg", { viewBox: "0 0 300 100", preserveAspectRatio: "none", "aria-hidden": "true" });
    this.plot.append(svg("line", { class: "axis", x1: 0, x2: 300, y1: 100, y2: 100 }));
    this.paths = lines.map((line) => svg("path", { class: line.style }));
    this.plot.append(...this.paths);
    const plot = el("div", { class: "plot" }, this.plot, this.top, this.low, el("span", { class: "when" }, "now"));
    this.node = el("figure", {}, el("figcaption", {}, el("b", {}, title), this.legend), plot);
    this.labels = lines.map((line) => {
      const text = el("span", {});
      this.legend.append(el("span", {}, el("i", { class: line.style }), text));
      return text;
    });
  }

  add(at, overview) {
    const values = this.lines.map((line) => line.of(overview) ?? null);
    this.points.push({ at, values });
    while (this.points.length && at - this.points[0].at > HISTORY_S * 1000) this.points.shift();
    this.lines.forEach((line, i) => say(this.labels[i], `${line.name} ${this.words(values[i])}`));
    this.draw(at);
  }

  draw(at) {
    const tops = this.lines.map((line, i) => Math.max(0, ...this.points.map((p) => p.values[i] ?? 0)));
    const seen = Math.max(0, ...tops.filter((_, i) => this.lines[i].style !== "goal"));
    const goal = Math.max(0, ...tops.filter((_, i) => this.lines[i].style === "goal"));
    const shown = Math.min(HISTORY_S, Math.max(SHORTEST_S, (at - this.points[0].at) / 1000));
    say(this.low, `0, ${span(shown)} ago`);
    const top = nice(goal && goal < seen * 4 ? Math.max(seen, goal) : seen);
    say(this.top, this.words(top));
    this.paths.forEach((path, i) => {
      const above = this.lines[i].style === "goal" && goal > top;
      let drawn = "", pen = "M";
      for (const point of this.points) {
        const value = point.values[i];
        if (value === null || above) { pen = "M"; continue; }
        const x = 300 - ((at - point.at) / 1000 / shown) * 300;
        drawn += `${pen}${x.toFixed(1)} ${(100 - (value / top) * 96).toFixed(1)}`;
        pen = "L";
      }
      dress(path, "d", drawn);
    });
  }
}

// The next of 1, 2, 5, 10, ... so that the scale does not move with every value.
function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => step * power >= value);
}

const goalOf = (name) => (o) => o.promises?.standard?.[name];
const charts = [
  new Chart("Time to first token", [
    { name: "p50", style: "a", of: (o) => o.traffic?.ttft.p50_ms },
    { name: "p95", style: "b", of: (o) => o.traffic?.ttft.p95_ms },
    { name: "promised", style: "goal", of: goalOf("ttft_ms") },
  ], ms),
  new Chart("Gap between tokens", [
    { name: "p50", style: "a", of: (o) => o.traffic?.itl.p50_ms },
    { name: "p95", style: "b", of: (o) => o.traffic?.itl.p95_ms },
    { name: "promised", style: "goal", of: goalOf("itl_ms") },
  ], ms),
  new Chart("Kept promises per dollar", [
    { name: "last minute", style: "a", of: (o) => o.objective.successes_per_usd },
  ], num),
];
