// The first view: figures, conditions, decisions, gateways, and what can be set by hand.

function tile(title) {
  const big = el("dd", { class: "big" }, NONE), small = el("dd", { class: "small" });
  $("tiles").append(el("div", {}, el("dt", {}, title), big, small));
  return (value, words) => { say(big, value); say(small, words); };
}

const tiles = {
  replicas: tile("Replicas"),
  arrivals: tile("Requests/s"),
  open: tile("In flight"),
  met: tile("Promises kept"),
  cost: tile("Kept promises/USD"),
  output: tile("Output tokens/s"),
};

function showTiles(o) {
  const { traffic: t, objective, fleet } = o;
  const running = fleet ? fleet.replicas_running : o.replicas.length;
  const target = fleet ? `of ${fleet.replicas_target} wanted, ${fleet.replicas_min} to ${fleet.replicas_max} allowed` : "Serve has not said how many";
  tiles.replicas(num(running), fleet?.unschedulable ? `${fleet.unschedulable} find no room` : target);
  tiles.arrivals(num(t?.arrivals_ps), t ? `${num(t.retries_ps)} retries/s` : "no gateway reports");
  tiles.open(num(t?.inflight), t ? `${num(t.queued)} wait at gateways` : "");
  const bad = objective.refused + objective.failed;
  tiles.met(share(objective.met_share), `last minute: ${num(objective.succeeded)} answered, ${num(bad)} refused or failed`);
  const price = objective.priced ? `${num(objective.usd_per_hour)} USD an hour` : "no price set: 1 USD a replica-hour";
  tiles.cost(num(objective.successes_per_usd), price);
  tiles.output(num(t?.output_tps), `up ${span(o.uptime_s)}, tick ${num(o.tick)}`);
}

// --- conditions ---

let activeNames = null;

// Where it is, unless its own words say so.
function places({ targets, text }) {
  if (!targets?.length || targets.some((target) => text.includes(target))) return "";
  return `; at ${targets.slice(0, 6).join(", ")}${targets.length > 6 ? ` and ${targets.length - 6} more` : ""}`;
}


function showConditions({ watched, active }) {
  renew($("conditions"), active.map((c) => [c.name, c.text, c.targets, Math.round((c.since_s ?? 0) / 10)]), () =>
    active.length === 0
      ? [el("p", { class: "muted" }, `Nothing is wrong. ${watched} conditions are watched.`)]
      : active.map((c) => el("article", {},
        el("h3", {}, c.title, el("span", { class: "muted" }, `  ${c.name}, for ${span(c.since_s)}`)),
        el("p", {}, `${c.text}${places(c)}.`),
        el("p", { class: "next" }, el("b", {}, "Next step: "), c.next_step))));
  const names = new Set(active.map((c) => c.name));
  if (activeNames !== null) {
    const begun = active.filter((c) => !activeNames.has(c.name)).map((c) => c.title);
    const over = [...activeNames].filter((name) => !names.has(name));
    if (begun.length || over.length) {
      announce([...begun.map((t) => `Began: ${t}.`), ...over.map((n) => `Over: ${n}.`)].join(" "));
    }
  }
  activeNames = names;
}

// --- decisions ---

function pairs(figures) {
  return Object.entries(figures ?? {}).map(([name, value]) => `${name} ${num(value)}`).join(", ") || NONE;
}

async function story(box, seq) {
  if (box.childElementCount) return;
  try {
    const found = (await call("GET", `/control/decisions?limit=1&since_seq=${seq - 1}`))[0];
    if (!found || found.seq !== seq) throw new Error("It is too old to be kept.");
    const others = found.alternatives.map((a) => `${a.lever}: ${a.change}${a.why_not ? ` (not taken: ${a.why_not})` : ""}`);
    const facts = [
      ["Before", pairs(found.before)], ["After", pairs(found.after)],
      ["Conditions", found.condition_details.map((c) => `${c.title}: ${c.text}`).join("; ") || "none was active"],
      ["Considered", others.join("; ") || "nothing else"], ["Predicted", pairs(found.predicted)],
      ["Measured", pairs(found.realised)], ["Figures", pairs(found.inputs)],
    ];
    box.append(...facts.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]));
  } catch (error) {
    box.append(el("dt", {}, "Cannot be shown"), el("dd", {}, error.message));
  }
}

function showDecisions(decisions, epoch) {
  const list = $("decisions");
  const known = new Map([...list.children].map((node) => [node.dataset.key, node]));
  const nodes = decisions.map((d) => known.get(JSON.stringify([epoch, d.seq, d.verdict])) ?? decision(d, epoch));
  if (nodes.length === 0) { renew(list, "none", () => [el("li", { class: "muted" }, "None yet: the fleet is steady.")]); return; }
  list.madeFrom = "some";
  if (nodes.some((node, i) => list.children[i] !== node) || list.children.length !== nodes.length) list.replaceChildren(...nodes);
}

function decision(d, epoch) {
  const facts = el("dl", {});
  return el("li", { "data-key": JSON.stringify([epoch, d.seq, d.verdict]) },
    el("p", { class: "line" }, d.line.replaceAll(" -> ", "\u00a0\u2192 ")),
    el("p", {}, d.why, el("span", { class: "muted" }, `  ${d.code}`)),
    d.verdict_text ? el("p", { class: "muted" }, d.verdict_text) : null,
    el("details", { ontoggle: () => story(facts, d.seq) }, el("summary", { "aria-label": `The whole story of decision ${d.seq}` }, "The whole story"), facts));
}

// --- gateways ---

function showGateways(gateways) {
  const names = [...$("gateways").tHead.rows[0].cells].map((cell) => cell.textContent);
  renew($("gateways").tBodies[0], gateways, () => gateways.map((g) => {
    const alone = Object.entries(g.ejected).map(([id, why]) => `${id} (${why})`).join(", ") || "nobody";
    const values = [g.id, num(g.arrivals_ps), num(g.inflight), num(g.queued), alone, `${span(g.age_s)} ago`];
    return el("tr", { role: "row" }, ...values.map((text, i) => el("td", { role: "cell", "data-name": names[i] }, text)));
  }));
}

// --- what is set by hand ---

async function change(method, path, body, done) {
  try {
    await call(method, path, body);
    announce(done);
    live.soon();
    return true;
  } catch (error) {
    await sure("Nothing was changed", error.message, "OK");
    return false;
  }
}

async function setShadow(shadow, knob) {
  const what = knob ? `decisions about ${knob}` : "all decisions";
  const text = shadow
    ? `For one hour ${what} are written down and not acted on.`
    : `${what[0].toUpperCase()}${what.slice(1)} are acted on again.`;
  if (!(await sure(shadow ? "Turn shadow mode on?" : "Act again?", text, shadow ? "Turn it on" : "Act"))) return;
  await change("POST", "/control/shadow", { shadow, ...(knob ? { knob } : {}), expires_in_s: 3600, why: "set on the page" },
    shadow ? "Shadow mode is on." : "Decisions are acted on.");
}

function showSteering(o) {
  const shadowed = o.knobs.filter((k) => k.mode !== "act").length;
  const mode = shadowed === 0 ? "acting" : shadowed === o.knobs.length ? "shadow: nothing is changed" : `${shadowed} knobs in shadow`;
  say($("mode"), mode);
  dress($("mode"), "class", `pill ${shadowed ? "warn" : "good"}`);
  say($("shadow-all"), shadowed ? "Act again" : "Shadow mode for all");
  $("shadow-all").onclick = () => setShadow(!shadowed);
  const each = "each replica its own";
  const shown = o.knobs.map((k) => [k.knob, k.knob in o.plan ? num(o.plan[k.knob]) : each, k.mode, k.because,
    k.held.map((h) => `${h.kind} for ${span(h.expires_in_s)}: ${h.reason}`).join("; ").slice(0, 200)]);
  renew($("knobs").tBodies[0], shown.map((row) => [...row.slice(0, 4), row[4].replace(/\d+ s\b/g, "")]), () => shown.map(([knob, value, acted, because, held]) =>
    el("tr", { role: "row" }, el("td", { role: "cell" }, el("code", {}, knob)), el("td", { role: "cell" }, value),
      el("td", { role: "cell" }, acted === "act" ? "acted on" : `shadow (${because})`, held ? el("span", { class: "muted" }, `; ${held}`) : null),
      el("td", { role: "cell" }, el("button", { class: "plain", "aria-label": `${acted === "act" ? "Shadow" : "Act on"} ${knob}`,
        onclick: () => setShadow(acted === "act", knob) }, acted === "act" ? "Shadow" : "Act")))));
  renew($("overrides"), o.overrides.map((x) => [x.id, Math.round(x.expires_in_s / 60)]), () =>
    o.overrides.length === 0 ? [el("li", { class: "muted" }, "None is in force.")] : o.overrides.map(overrideRow));
  renew($("o-knob"), o.knobs.map((k) => k.knob), () => o.knobs.map((k) => el("option", {}, k.knob)));
  renew($("o-targets"), o.replicas.map((r) => r[0]), () => o.replicas.map((r) => el("option", { value: r[0] })));
}

function overrideRow(x) {
  const what = `${x.knob ?? "every knob"}${x.target === "*" ? "" : ` of ${x.target}`} ${x.mode ? `in ${x.mode} mode` : `= ${num(x.value)}`}`;
  const rest = `, ${span(x.expires_in_s)} left${x.by ? `, by key ${x.by}` : ""}${x.why ? `: ${x.why}` : ""}`;
  const back = async () => {
    if (await sure("Take it back?", `${what}${rest}. The control plane decides again.`, "Take it back")) {
      await change("DELETE", `/control/overrides/${encodeURIComponent(x.id)}`, undefined, "The override is gone.");
    }
  };
  return el("li", {}, el("span", {}, el("code", {}, what), rest), el("button", { class: "plain", onclick: back, "aria-label": `Take back ${what}` }, "Take back"));
}

$("override-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const target = $("o-target").value.trim();
  const body = { knob: $("o-knob").value, value: Number($("o-value").value), expires_in_s: Number($("o-minutes").value) * 60 };
  if (target) body.target = target;
  if ($("o-why").value.trim()) body.why = $("o-why").value.trim();
  const text = `${body.knob} of ${target || "all"} stands at ${body.value} for ${$("o-minutes").value} minutes, whatever the control plane decides.`;
  if (await sure("Set this override?", text, "Set it") && await change("POST", "/control/overrides", body, "The override is set.")) $("o-value").value = "";
});
