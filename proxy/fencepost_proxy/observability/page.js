// The status page: fetches the JSON of its path every few seconds and renders it. Clients choose names of topics, groups
// and software: every value becomes a text node or an attribute, never markup.

const REFRESH_MS = 5_000;
const RESPONSE_MS = 10_000;
const HISTORY_SECONDS = 900;
const CHART = {width: 180, height: 32};
const LIMIT = 50; // rows of a list page, if the query has no limit
const FIRST = 20; // rows of each list on the overview
const TEXT_MAX = 200;
const PROBLEM_TEXT_MAX = 600;
const PROSE_FROM = 40; // longer cells wrap
const THRESHOLDS_MAX = 8;
const WAITS_MAX = 3;
const HOUR_MS = 3_600_000;
const DASH = "–";

const STATES = {
  healthy: ["good", "✓ Healthy", "Serving; no problems found."],
  warning: ["warn", "△ Serving, with warnings", ""],
  degraded: ["bad", "✕ Serving, but degraded", ""],
  not_ready: ["bad", "✕ Not ready", "Do not send clients here at the moment."],
};
const SEARCHES = {"/": "Find a topic", "/clients": "Client id, user, address or software", "/groups": "Group or topic"};

let now = Date.now(); // by the proxy's clock
let reasons = {}; // why a transaction hangs, by code

// ---- values as text

const count = (number) => number.toLocaleString("en");
const partition = (row) => `${row.topic}-${row.partition}`;
const producer = (row) => row.producer_epoch === null ? `${row.producer_id}` : `${row.producer_id}/${row.producer_epoch}`;
const total = (counts) => Object.values(counts).reduce((sum, each) => sum + each, 0);

function printable(value, most = TEXT_MAX) {
  const text = String(value);
  return (text.length > most ? `${text.slice(0, most)}…` : text).replace(/[\p{C}\p{Zl}\p{Zp}]/gu, "\uFFFD");
}

function duration(seconds) {
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  if (days) return `${days} d ${hours % 24} h`;
  if (hours) return `${hours} h ${minutes % 60} min`;
  return minutes ? `${minutes} min` : `${Math.round(seconds)} s`;
}

function ago(ms) {
  const since = Math.max(0, now - ms);
  if (since < HOUR_MS) return `${duration(since / 1000)} ago`;
  return new Date(ms).toISOString().replace("T", " ").replace(/\..*/, " UTC");
}

function bytes(size) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (size < 1024) return `${size.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    size /= 1024;
  }
  return `${size.toFixed(1)} TiB`;
}

// Upper bounds from histogram buckets; null: above the last one.
function added(bounds) {
  const shown = (seconds) => {
    if (seconds === null) return "> 1 s";
    return seconds < 0.001 ? `< ${(seconds * 1e6).toFixed(0)} µs` : `< ${+(seconds * 1e3).toPrecision(6)} ms`;
  };
  return bounds === null ? DASH : bounds.map(shown).join(" · ");
}

// ---- elements

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const link = (href, text) => element("a", {href}, printable(text));
const toned = (tone) => (text) => ({text, tone});
const bad = toned("bad"), warn = toned("warn"), soft = toned("soft");
const linked = (text, path, query) => ({text, href: `${path}?${new URLSearchParams(query)}`});

// A cell is null, a number, a text, or {text, href, tone, number}.
function cell(value) {
  if (value === null || value === undefined) return {text: DASH, empty: true};
  if (typeof value === "number") return {text: count(value), number: true};
  return typeof value === "object" ? value : {text: value};
}

function cellElement(shown, column, isNumber, isFirst) {
  const prose = !isNumber && shown.text.length > PROSE_FROM;
  const kinds = [isNumber && "number", prose && "prose", shown.tone].filter(Boolean).join(" ");
  const role = isFirst ? {scope: "row", role: "rowheader"} : {role: "cell", "data-label": column};
  const content = shown.href ? link(shown.href, shown.text) : element("span", {}, printable(shown.text));
  return element(isFirst ? "th" : "td", kinds ? {...role, class: kinds} : role, content);
}

// `columns`: a function from row to cell, by title. `heading`: shown after the title.
function table(title, columns, rows, ...heading) {
  if (!rows.length) return [];
  const names = Object.keys(columns);
  const cells = rows.map((row) => names.map((name) => cell(columns[name](row))));
  const isNumber = names.map((_, at) => {
    const known = cells.map((row) => row[at]).filter((each) => !each.empty);
    return at > 0 && known.length > 0 && known.every((each) => each.number);
  });
  const head = names.map((name, at) => element("th", isNumber[at] ? {scope: "col", class: "number"} : {scope: "col"}, name));
  const body = cells.map((row) =>
    element("tr", {role: "row"}, ...row.map((each, at) => cellElement(each, names[at], isNumber[at], at === 0))));
  const content = [element("thead", {}, element("tr", {role: "row"}, ...head)), element("tbody", {}, ...body)];
  const box = element("div", {class: "box"}, element("table", {role: "table", "aria-label": printable(title)}, ...content));
  return [element("h2", {}, printable(title), ...heading), box];
}

function tiles(values) {
  const shown = Object.entries(values).map(([name, value]) => {
    const {text, tone} = cell(value);
    return element("div", {}, element("dt", {}, name), element("dd", tone ? {class: tone} : {}, printable(text)));
  });
  return element("dl", {class: "tiles"}, ...shown);
}

// A line over the last fifteen minutes, from 0 to its highest value. Unknown values are left out.
function line(ages, values, label) {
  const svg = (name, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  const most = Math.max(...values.filter((each) => each !== null), 1e-9);
  const points = values.flatMap((value, at) => value === null ? [] : [
    `${(CHART.width * (1 - ages[at] / HISTORY_SECONDS)).toFixed(1)},${(CHART.height * (1 - value / most)).toFixed(1)}`]);
  const box = svg("svg", {viewBox: `0 -1 ${CHART.width} ${CHART.height + 2}`, preserveAspectRatio: "none", role: "img", "aria-label": label});
  box.append(svg("polyline", {points: points.join(" ")}));
  return box;
}

const rate = (number) => number.toLocaleString("en", {maximumFractionDigits: number < 100 ? 1 : 0});
const share = (part) => `${(part * 100).toFixed(0)} %`;
const CHARTS = {
  "requests/s": ["requests", rate],
  "to Kafka, per s": ["to_kafka", bytes],
  "to clients, per s": ["to_clients", bytes],
  "refusals/min": ["refusals", rate],
  "time added, p99": ["added_p99", (seconds) => added([seconds])],
  "event loop delay": ["loop_late", (seconds) => added([seconds])],
  "CPU used": ["cpu", share],
  "waits for a CPU": ["cpu_wait", share],
};

function charts(history) {
  if (!history.seconds_ago?.length) return [];
  const made = Object.entries(CHARTS).map(([title, [column, text]]) => {
    const values = history[column], known = values.filter((each) => each !== null), last = values.at(-1);
    const now = last === null ? DASH : text(last), most = known.length ? text(Math.max(...known)) : DASH;
    const picture = line(history.seconds_ago, values, `${title} in the last 15 minutes: now ${now}, at most ${most}`);
    return element("div", {}, element("dt", {}, title), element("dd", {}, now, element("small", {}, ` max ${most}`), picture));
  });
  return [element("h2", {}, "Last 15 minutes"), element("dl", {class: "tiles charts"}, ...made)];
}

// ---- the lists: title, and columns

const LISTS = {
  topics: ["Checked topics", {
    topic: (t) => linked(t.topic, "/partitions", {topic: t.topic}),
    checks,
    partitions: (t) => t.partitions,
    "log ends, sum": logEnds,
    waiting: (t) => t.waiting,
    refused: (t) => t.refusals,
    "last refusal": lastRefusal,
  }],
  partitions: ["Partitions", {
    partition,
    leader: (p) => p.leader ?? {...bad("none"), number: true},
    sequencer: (p) => p.state ?? "not used yet",
    "log end": (p) => p.log_end_offset,
    "sequence offset": (p) => p.sequence_offset,
    waiting: (p) => p.waiting,
    refused: (p) => p.refusals,
    "last refusal": lastRefusal,
  }],
  refusals: ["Last refusals", {
    partition: (r) => linked(partition(r), "/partitions", {topic: r.topic}),
    when: (r) => ago(r.at_ms),
    reason: (r) => r.reason,
    expected: (r) => r.expected,
    "log end": (r) => r.log_end_offset,
    user: (r) => r.principal,
    "client id": (r) => r.client_id,
    from: (r) => r.client,
  }],
  expansions: ["Partition expansions", {
    topic: (e) => e.topic,
    partitions: (e) => `${count(e.from_count)} → ${count(e.to_count)}`,
    state: expansionState,
    when: (e) => ago(e.at_ms),
    "appends blocked": (e) => e.blocked_ms === null ? null : `${(e.blocked_ms / 1000).toFixed(1)} s`,
    thresholds,
  }],
  groups: ["Consumer groups with gated partitions", {
    group: (g) => g.group,
    "gated partition": partition,
    for: (g) => duration(g.seconds),
    "records left, at most": (g) => g.records_max,
    "lags in": waits,
  }],
  clients: ["Clients", {
    "client id": (c) => c.client_id,
    user: (c) => c.principal,
    from: (c) => c.address,
    software: (c) => c.software && `${c.software} ${c.version}`,
    listener: (c) => c.node_id === null ? "bootstrap" : `broker ${c.node_id}`,
    "connected for": (c) => duration(c.connected_seconds),
    activity,
  }],
  software: ["Client software", {
    software: (s) => s.software === null ? soft("unknown") : linked(s.software, "/clients", {search: s.software}),
    version: (s) => s.version,
    connections: (s) => s.connections,
  }],
};

function checks({configs}) {
  return Object.entries(configs).map(([name, value]) => `${name.replace("fencepost.", "")}=${value}`).join(", ");
}

function logEnds({ends_known, log_end_offsets, partitions}) {
  if (!ends_known) return null;
  const text = ends_known < partitions ? `${count(log_end_offsets)} in ${count(ends_known)}` : count(log_end_offsets);
  return {text, number: true};
}

function lastRefusal({last_refusal: last}) {
  return last && `${last.reason}, ${ago(last.at_ms)}`;
}

function expansionState({state, step, waits_for}) {
  if (state !== "pending") return state === "unordered" ? warn(state) : state;
  const doing = step ?? "run by another process";
  return warn(waits_for ? `${doing}: ${waits_for}` : doing);
}

function thresholds({thresholds: all}) {
  const more = all.length - THRESHOLDS_MAX;
  const shown = all.slice(0, THRESHOLDS_MAX).map(count).join(" ");
  return all.length ? shown + (more > 0 ? ` … ${count(more)} more` : "") : null;
}

function waits({waits: all, why}) {
  const more = all.length - WAITS_MAX;
  return [...all.slice(0, WAITS_MAX), ...more > 0 ? [`${count(more)} more`] : []].join("; ") || why;
}

function activity(client) {
  if (client.waits_for) return `waits for ${client.waits_for}`;
  return client.in_flight ? `${count(client.in_flight)} in flight` : `idle ${duration(client.idle_seconds)}`;
}

// ---- the overview

const INSTANCES = {
  host: (i) => i.host ?? soft("unknown"),
  "instance id": (i) => i.instance_id || null,
  version: (i) => i.version,
  "status page": (i) => i.status,
  "last heartbeat": (i) => i.this ? soft("this process") : i.live ? `${duration(i.heartbeat_seconds)} ago`
    : bad(`none for ${duration(i.heartbeat_seconds)}: dead or cut off`),
};
const BROKERS = {
  broker: (b) => b.node_id,
  "clients connect to": (b) => b.listener ?? bad("no listener"),
  Kafka: (b) => b.kafka,
  connections: (b) => b.connections,
  problem: (b) => b.problem && bad(b.problem),
};
const ABORT_ONLY = {
  "transactional id": (t) => t.transactional_id,
  producer,
  for: (t) => duration(t.seconds),
  why: (t) => t.why,
};
const HANGING = {
  partition,
  "from offset": (h) => h.start_offset,
  producer,
  "transactional id": (h) => h.transactional_id ?? "unknown",
  "observed for": (h) => duration(h.observed_seconds),
  why: (h) => reasons[h.why],
};
const OPEN = {
  "transactional id": (o) => o.transactional_id,
  state: (o) => o.state,
  age: (o) => o.age_seconds === null ? null : duration(o.age_seconds),
  producer,
  coordinator: (o) => o.coordinator,
  partitions: (o) => o.partitions,
  problem: (o) => o.stuck && reasons[o.stuck],
};
const LAGGING = {
  partition,
  LSO: (l) => l.last_stable_offset,
  "high watermark": (l) => l.high_watermark,
  lag: (l) => l.lag,
  "unchanged for": (l) => duration(l.seconds),
};

function stateOf(status) {
  const [tone, title, text] = STATES[status.state];
  const block = element("div", {class: `is-${tone}`}, element("h2", {}, title));
  if (text) block.append(element("p", {}, text));
  return [block];
}

function problems(found) {
  const items = found.map((each) => {
    const sign = element("span", {class: "sign"}, each.bad ? "✕" : "△");
    const what = element("b", {}, sign, ` ${printable(each.what, PROBLEM_TEXT_MAX)}`);
    const more = each.page ? [" ", link(each.page, "more")] : [];
    return element("li", {class: each.bad ? "is-bad" : "is-warn"}, what, printable(each.do, PROBLEM_TEXT_MAX), ...more);
  });
  return items.length ? [element("ul", {"aria-label": "Problems and actions"}, ...items)] : [];
}

function figures(s) {
  const code = (text) => element("code", {}, printable(text));
  const words = element("p", {class: "soft"},
    ...s.bootstrap ? ["clients connect to ", code(s.bootstrap)] : ["not listening"],
    " · cluster ", code(s.cluster_id ?? "unknown"),
    ` · up for ${duration(s.uptime_seconds)} · fencepost ${printable(s.version)} (${printable(s.executor)})`);
  return [words, tiles({
    connections: `${count(s.connections)} of ${count(s.connections_max)}`,
    "requests in flight": s.requests_in_flight,
    "to Kafka": bytes(s.bytes_to_kafka),
    "to clients": bytes(s.bytes_to_clients),
    "buffered in memory": `${bytes(s.buffered_bytes)} of ${bytes(s.buffered_bytes_max)}`,
    "time added (median, p99)": added(s.added_seconds),
    "checked topics": s.totals.checked_topics,
    refusals: total(s.refusals),
    "offset violations": s.violations,
    "config lease left": s.state_lease_seconds === null ? null : `${Math.max(0, s.state_lease_seconds).toFixed(1)} s`,
    ...Object.fromEntries(Object.entries(s.certificate_days).map(([of, days]) =>
      [`${of} certificate expires in`, {text: days > 0 ? duration(days * 86_400) : "expired", tone: days < 14 && "warn"}])),
  })];
}

// Shown also if no transaction hangs, unless transactions are not watched.
function transactions({transactions: t, abort_only_transactions: abortOnly}) {
  const endangered = table("Abort-only transactions", ABORT_ONLY, abortOnly);
  if (t === null) return endangered;
  const hanging = total(t.hanging_by_reason);
  const numbers = tiles({
    open: t.open_transactions,
    oldest: t.open_transactions ? duration(t.oldest_seconds) : null,
    hanging: hanging ? bad(count(hanging)) : hanging,
    "transactional ids": total(t.transactional_ids),
    "producer ids, all partitions": t.producer_ids,
    "partitions with LSO lag": `${count(t.lagging_partitions)} of ${count(t.partitions)}`,
    "last sweep of all partitions": t.sweep_age_seconds === null ? "not yet" : `${duration(t.sweep_age_seconds)} ago`,
  });
  return [
    element("h2", {}, "Transactions of the cluster"), numbers,
    ...table("Hanging transactions", HANGING, t.hanging),
    ...table("Open transactions", OPEN, t.open),
    ...table("Last stable offset below the high watermark", LAGGING, t.lagging),
    ...endangered,
  ];
}

function refusalReasons(refusals) {
  return table("Refusals by reason", {reason: ([name]) => name, batches: ([, batches]) => batches},
    Object.entries(refusals).sort(([one], [other]) => one < other ? -1 : 1));
}

// The first rows of a list, with a link to all.
function first(status, name, key = name, path = `/${name}`) {
  const all = element("small", {}, " ", link(path, `all ${count(status.totals[key])}`));
  return table(...LISTS[name], status[key], all);
}

function overview(status) {
  reasons = status.hanging_reasons;
  show("state", stateOf(status));
  show("problems", problems(status.problems));
  show("figures", figures(status));
  show("history", charts(status.history));
  show("instances", table("Proxies of the cluster", INSTANCES, status.instances));
  show("brokers", table("Brokers", BROKERS, status.brokers));
  show("topics", first(status, "topics", "checked_topics"));
  show("refusals", first(status, "refusals", "last_refusals"));
  show("expansions", first(status, "expansions"));
  show("groups", first(status, "groups", "gated"));
  show("transactions", transactions(status));
  show("software", first(status, "software", "software", "/clients"));
  show("reasons", refusalReasons(status.refusals));
  return STATES[status.state][1];
}

// All that the overview shows of transactions, without the rest.
function transactionsPage(status) {
  reasons = status.hanging_reasons;
  const watched = status.transactions !== null;
  show("transactions", watched ? transactions(status) : [element("p", {}, "Not watched: watch_transactions is false.")]);
  return "Transactions";
}

// ---- a list

const path = location.pathname, query = new URLSearchParams(location.search);

function listPage(answer) {
  const [name, columns] = LISTS[path.slice(1)];
  const title = query.has("topic") && path === "/partitions" ? `${name} of ${query.get("topic")}` : name;
  const none = () => [element("h2", {}, printable(title)), element("p", {class: "soft"}, "None.")];
  const shown = table(title, columns, answer.rows);
  show("list", shown.length ? [...shown, listPages(answer)] : none());
  return printable(title);
}

function listPages({offset, rows, matching, next}) {
  const limit = Number(query.get("limit") ?? LIMIT), last = offset + rows.length;
  const to = (first, text) => link(`${path}?${changed({offset: first, limit})}`, text);
  return element("nav", {class: "pages", "aria-label": "List pages"},
    element("span", {class: "soft"}, `${count(offset + 1)} to ${count(last)} of ${count(matching)}`),
    ...offset ? [to(Math.max(0, offset - limit), "previous")] : [],
    ...next ? [to(last, "next")] : []);
}

function changed(values) {
  const whole = new URLSearchParams(query);
  for (const [name, value] of Object.entries(values)) whole.set(name, value);
  return whole;
}

// ---- the document

const isOverview = path === "/", ofStatus = {"/": overview, "/transactions": transactionsPage}[path];
const source = ofStatus ? `/status.json?limit=${FIRST}` : `${path}.json${location.search}`;
const byId = (id) => document.getElementById(id);

// Replaces a section that changed. A link in it keeps the focus.
function show(id, nodes) {
  const section = byId(id), fresh = section.cloneNode(false), active = document.activeElement;
  fresh.append(...nodes);
  if (section.isEqualNode(fresh)) return;
  const focused = section.contains(active) ? active.getAttribute("href") : null;
  section.replaceChildren(...nodes);
  if (focused) [...section.querySelectorAll("a")].find((each) => each.getAttribute("href") === focused)?.focus();
}

function prepare() {
  for (const each of byId("pages").children) {
    if (each.getAttribute("href") === path) each.setAttribute("aria-current", "page");
  }
  byId("label").textContent = SEARCHES[path] ?? "Topic";
  if (isOverview) return;
  byId("form").hidden = Boolean(ofStatus);
  byId("json").setAttribute("href", source);
  byId("form").setAttribute("action", path);
  byId("search").value = query.get("search") ?? "";
  if (query.has("topic")) byId("form").append(element("input", {type: "hidden", name: "topic", value: query.get("topic")}));
}

let paused = false, answered = new Date();

async function refresh() {
  if (paused || document.hidden) return;
  try {
    const answer = await fetch(source, {cache: "no-store", signal: AbortSignal.timeout(RESPONSE_MS)});
    if (!answer.ok) throw new Error(`HTTP status ${answer.status}: ${await answer.text()}`);
    now = Date.parse(answer.headers.get("date"));
    const title = (ofStatus ?? listPage)(await answer.json());
    document.title = `${title} – Fencepost`;
    answered = new Date();
    byId("lost").hidden = true;
  } catch (error) {
    document.title = "No response – Fencepost";
    byId("lost").textContent = `No response from the proxy since ${answered.toLocaleTimeString()}: this page is out of date. `
      + `Is the proxy still running? (${printable(error.message)})`;
    byId("lost").hidden = false;
  }
}

async function repeat() {
  await refresh();
  setTimeout(repeat, REFRESH_MS);
}

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").textContent = paused ? "Resume" : "Pause";
  refresh();
});
document.addEventListener("visibilitychange", refresh);
prepare();
repeat();
