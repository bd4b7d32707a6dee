// Once a second: ask, show. Tabs and the key.

const POLL_MS = 1000;
const replicas = new Replicas();
document.querySelector(".charts").append(...charts.map((chart) => chart.node));

const live = {
  timer: 0,
  heardAt: null,
  soon() { clearTimeout(this.timer); this.timer = setTimeout(() => this.look(), 50); },
  async look() {
    clearTimeout(this.timer);
    if (document.hidden) return;
    const began = performance.now();
    let wait = POLL_MS;
    try {
      show(await call("GET", "/control/overview"));
      this.heardAt = Date.now();
      tell("Live", "good");
      needKey(null);
    } catch (error) {
      if (error.status === 401 || error.status === 403) {
        tell("Key needed", "warn");
        needKey(key.value || error.status === 403 ? error.message : "This gateway answers with an API key only.");
        return;
      }
      wait = 2 * POLL_MS;
      const since = this.heardAt === null ? "" : ` since ${new Date(this.heardAt).toLocaleTimeString()}`;
      tell(`No answer${since}`, "bad", error.message);
    }
    this.timer = setTimeout(() => this.look(), Math.max(100, wait - (performance.now() - began)));
  },
};

function tell(text, kind, why = "") {
  say($("live"), text);
  dress($("live"), "class", `pill ${kind}`);
  dress($("live"), "title", why);
}

function show(o) {
  const began = performance.now();
  renew($("model"), [o.model, o.models], () => o.models.flatMap((name) => [name === o.model
    ? el("span", { "aria-current": "page" }, name)
    : el("a", { href: `?model=${encodeURIComponent(name)}` }, name), " "]));
  showTiles(o);
  showConditions(o.conditions);
  charts.forEach((chart) => chart.add(Date.now(), o));
  replicas.take(o);
  showDecisions(o.decisions, o.epoch);
  showGateways(o.gateways);
  showSteering(o);
  performance.measure("show", { start: began });
}

function needKey(why) {
  const asked = why !== null;
  $("forget").hidden = !key.value;
  say($("ask-key-why"), why);
  if ($("ask-key").hidden === !asked) return;
  $("ask-key").hidden = !asked;
  $("fleet").classList.toggle("waiting", asked);
  showTab(document.querySelector("[role=tab][aria-selected=true]"));
  if (asked) $("key").focus();
}

function showTab(tab) {
  for (const each of document.querySelectorAll("[role=tab]")) {
    const chosen = each === tab;
    dress(each, "aria-selected", String(chosen));
    each.tabIndex = chosen ? 0 : -1;
    const panel = $(each.getAttribute("aria-controls"));
    panel.hidden = !chosen || (panel.id === "fleet" && panel.classList.contains("waiting"));
  }
  if (tab.id === "tab-try") loadModels();
}

for (const tab of document.querySelectorAll("[role=tab]")) {
  tab.addEventListener("click", () => { history.replaceState(null, "", tab.id === "tab-try" ? "#try" : "#"); showTab(tab); });
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    const other = tab.id === "tab-try" ? $("tab-fleet") : $("tab-try");
    other.focus();
    other.click();
  });
}
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.value = $("key").value.trim();
  $("key").value = "";
  live.look();
});
$("forget").addEventListener("click", () => { key.value = null; location.reload(); });
document.addEventListener("visibilitychange", () => live.look());
showTab(location.hash === "#try" ? $("tab-try") : $("tab-fleet"));
live.look();
