// The second view: one prompt, its answer as it arrives, and what became of it.

const LOOKS = 8;
let running = null;

async function loadModels() {
  if ($("t-model").options.length) return;
  try {
    const { data } = await call("GET", "/v1/models");
    $("t-model").append(...data.map((model) => el("option", {}, model.id)));
  } catch (error) {
    say($("t-status"), `The models cannot be listed: ${error.message}`);
  }
}

function pieceOf(event) {
  if (event.error) throw new Refusal(200, event.error.code ?? "", event.error.message);
  return event.choices?.[0]?.delta?.content ?? "";
}

// Hands each event of a stream to `take` as it arrives.
async function readEvents(body, take) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("");
      if (data && data !== "[DONE]") take(JSON.parse(data));
    }
  }
}

async function send() {
  const stream = $("t-stream").checked;
  const body = { model: $("t-model").value, messages: [{ role: "user", content: $("t-prompt").value }], max_tokens: Number($("t-tokens").value), stream };
  if (stream) body.stream_options = { include_usage: true };
  const began = performance.now();
  let first = null;
  say($("answer"), "");
  say($("t-status"), "Waiting for the first token.");
  const put = (text) => {
    if (!text) return;
    if (first === null) { first = performance.now() - began; say($("t-status"), `First token after ${ms(first)}.`); }
    $("answer").append(text);
  };
  const answer = await ask("POST", "/v1/chat/completions", body, { "x-tidegate-class": $("t-class").value }, running.signal);
  const id = answer.headers.get("x-request-id");
  try {
    if (!answer.ok) throw await refusal(answer);
    if (stream) await readEvents(answer.body, (event) => put(pieceOf(event)));
    else put((await answer.json()).choices[0].message.content ?? "");
    say($("t-status"), `Done after ${ms(performance.now() - began)}${first === null ? "" : `; first token after ${ms(first)}`}.`);
  } catch (error) {
    say($("t-status"), running.signal.aborted ? "Stopped." : `It ended with an error: ${error.message}`);
  }
  if (id) await showWay(id);
}

// The gateway that answered knows; with several, asking again reaches it sooner or later.
async function lookUp(id) {
  for (let look = 1; ; look += 1) {
    try { return await call("GET", `/control/requests/${id}`); } catch (error) {
      if (error.status !== 404 || look === LOOKS) throw error;
      await new Promise((resolve) => { setTimeout(resolve, 150 * look); });
    }
  }
}

async function showWay(id) {
  const box = $("went");
  try {
    box.replaceChildren(...way(await lookUp(id)));
  } catch (error) {
    box.replaceChildren(el("p", {}, "Request ", el("code", {}, id)), el("p", { class: "muted" }, error.message));
  }
}

function way(r) {
  const parts = [["queue", r.queue_ms], ["route", r.route_ms], ["engine", r.engine_ttft_ms]];
  const bar = el("div", { class: "split", "aria-hidden": "true" }, ...parts.map(([name, value]) => {
    const part = el("i", { class: name });
    part.style.setProperty("--v", String(value ?? 0));
    return part;
  }));
  const legend = parts.flatMap(([name, value]) => [el("i", { class: `key ${name}` }), `${name} ${ms(value)}`]);
  const hops = r.replicas.map((replica, i) => `${i ? ", then " : ""}${replica} (${r.ends[i]})`).join("") || "none: it was not sent to a replica";
  const refused = r.outcome === "refused" ? `refused: ${r.reason}` : `let in${r.queue_ms > 1 ? ` after ${ms(r.queue_ms)} in the queue` : " at once"}`;
  const facts = [
    ["Request", r.id], ["Replica", hops],
    ["Chosen because", r.routed ? `${r.routed.text} [${r.routed.code}]` : "routing was not asked"],
    ["Admission", refused], ["Attempts", `${r.attempts}${r.resumed ? `, resumed ${r.resumed} times` : ""}${r.hedged ? ", hedged" : ""}`],
    ["First token", `${ms(r.ttft_ms)}${r.predicted_ttft_ms === null ? "" : `; routing predicted ${ms(r.predicted_ttft_ms)} from dispatch`}`],
    ["Whole answer", ms(r.e2e_ms)],
    ["Tokens", `${num(r.prompt_tokens)} prompt, of which ${num(r.cached_tokens)} cached; ${num(r.output_tokens)} output`],
    ["Cost", r.usd === null ? "not charged" : `${r.usd} USD`],
    ["Ended", `${r.outcome}: ${r.reason}${r.status ? `, status ${r.status}` : ""}`], ["Class, tenant", `${r.class ?? NONE}, ${r.tenant}`],
    ["Gateway", r.gateway],
  ];
  return [bar, el("p", { class: "legend" }, ...legend), el("dl", { class: "facts" }, ...facts.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]))];
}

$("try-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) return;
  running = new AbortController();
  $("t-send").disabled = true;
  $("t-stop").disabled = false;
  try { await send(); } catch (error) {
    say($("t-status"), running.signal.aborted ? "Stopped." : `It cannot be sent: ${error.message}`);
  }
  running = null;
  $("t-send").disabled = false;
  $("t-stop").disabled = true;
});
$("t-stop").addEventListener("click", () => running?.abort());
