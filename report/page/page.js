// The page's own script: it draws the charts and moves them. Every number is in the HTML already.
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const charts = await unpack(document.getElementById("charts").textContent);
const views = {};

async function unpack(text) { // base64 of gzip of JSON
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

async function draw(place) {
  const options = { renderer: "svg", actions: false, tooltip: { theme: "page" } };
  const result = await vegaEmbed(place, charts[place.dataset.chart], options);
  views[place.dataset.chart] = result.view;
}

// --- theme: the button overrides the system's choice; colours are CSS variables ---
const dark = matchMedia("(prefers-color-scheme: dark)");
const button = document.getElementById("theme");
function isDark() {
  return (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
}
function sayTheme() {
  button.setAttribute("aria-pressed", String(isDark()));
}
button.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  sayTheme();
});
dark.addEventListener("change", sayTheme);
sayTheme();

// --- mesh: cells in as many columns as there is room for, and the groups of one rank ---
const CELL_PIXELS = 16;
const WIDE_CELL_PIXELS = 28; // where there are few blocks
const FEW_BLOCKS = 16;
const ROW_PIXELS = 56;
const LISTED = 8;

function members(rank, axis) {
  const at = Math.floor(rank / axis.stride) % axis.degree;
  const first = rank - at * axis.stride;
  return Array.from({ length: axis.degree }, (_, number) => first + number * axis.stride);
}

function layOut(mesh, view, width) {
  const cell = mesh.blocks <= FEW_BLOCKS ? WIDE_CELL_PIXELS : CELL_PIXELS;
  const most = Math.max(1, Math.floor(width / ((mesh.perBlock + 1) * cell)));
  const rows = Math.ceil(mesh.blocks / Math.min(most, mesh.blocks));
  const columns = Math.ceil(mesh.blocks / rows);
  view.signal("columns", columns).height(rows * ROW_PIXELS).runAsync();
}

function sayRank(mesh, rank, place) {
  const pipeline = members(rank, mesh.pipeline).indexOf(rank);
  const node = Math.floor(rank / mesh.perNode);
  const lines = [
    `Rank ${rank} is GPU ${rank % mesh.perNode} of node ${node}. ` +
      `Pipeline rank ${pipeline} runs ${mesh.layers[pipeline]}.`,
  ];
  for (const [name, axis] of Object.entries(mesh.axes)) {
    const group = members(rank, axis);
    const nodes = new Set(group.map((other) => Math.floor(other / mesh.perNode))).size;
    const more = group.length > LISTED ? ` and ${group.length - LISTED} more` : "";
    const listed = group.slice(0, LISTED).join(", ") + more;
    const sent = mesh.sent[name]?.[pipeline];
    const carries = sent ? ` Each of them has collectives of ${sent} over it in a step.` : "";
    lines.push(`Its ${name} group has ${group.length} ranks on ${nodes} ` +
      `${nodes === 1 ? "node" : "nodes"}: ${listed}.${carries}`);
  }
  place.replaceChildren(...lines.map((line) => {
    const paragraph = document.createElement("p");
    paragraph.textContent = line;
    return paragraph;
  }));
}

function links(mesh, rank) {
  const cell = (other) => Math.floor(other / mesh.perCell);
  const point = { axis: "", from: cell(rank), to: cell(rank) }; // scales need a row
  const lines = Object.entries(mesh.axes).flatMap(([axis, shape]) => {
    const cells = [...new Set(members(rank, shape).map(cell))];
    return cells.slice(1).map((to, index) => ({ axis, from: cells[index], to }));
  });
  return [point, ...lines];
}

function startMesh(article, mesh) {
  const place = article.querySelector(".chart");
  const view = views[place.dataset.chart];
  const input = article.querySelector("input");
  function choose(rank) {
    view.data("links", links(mesh, rank)).signal("chosen", Math.floor(rank / mesh.perCell)).runAsync();
    sayRank(mesh, rank, article.querySelector(".said"));
  }
  input.addEventListener("input", () => {
    const rank = input.valueAsNumber;
    if (Number.isInteger(rank) && rank >= 0 && rank < mesh.ranks) choose(rank);
  });
  view.addEventListener("click", (_, item) => {
    if (item?.datum?.c === undefined) return;
    input.value = item.datum.c * mesh.perCell;
    choose(item.datum.c * mesh.perCell);
  });
  new ResizeObserver(() => layOut(mesh, view, place.clientWidth)).observe(place);
  choose(0);
}

// --- timeline: buttons and keys move the domain that dragging and the wheel move too ---
const FACTORS = { in: 0.5, out: 2 };
const STEPS = { left: -0.25, right: 0.25 };
const KEYS = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "whole" };
const ZOOMED = "zoom_a";

function startTimeline(place) {
  const chart = place.querySelector(".chart");
  const view = views[chart.dataset.chart];
  const step = Number(place.dataset.step);
  const shown = place.querySelector(".shown");
  const domain = () => view.signal(ZOOMED) ?? [0, step];
  function say() {
    const [from, to] = domain();
    shown.value = `${from.toPrecision(3)} to ${to.toPrecision(3)} s`;
  }
  function move(what) {
    const [from, to] = domain();
    const width = Math.min(step, (to - from) * (FACTORS[what] ?? 1));
    const middle = (from + to) / 2 + (STEPS[what] ?? 0) * (to - from);
    const first = Math.max(0, Math.min(step - width, middle - width / 2));
    const next = what === "whole" ? [0, step] : [first, first + width];
    view.signal(ZOOMED, next).runAsync();
  }
  for (const each of place.querySelectorAll("[data-zoom]")) {
    each.addEventListener("click", () => move(each.dataset.zoom));
  }
  chart.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
    event.preventDefault();
    move(KEYS[event.key]);
  });
  view.addSignalListener(ZOOMED, say);
  say();
}

// --- copying: where the browser forbids it, the text is selected ---
async function copy(snippet, pressed) {
  const code = snippet.querySelector("code");
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(code.textContent);
    pressed.textContent = "Copied";
  } else {
    getSelection().selectAllChildren(code);
    pressed.textContent = "Selected";
  }
}
for (const each of document.querySelectorAll("[data-copy]")) {
  each.addEventListener("click", () => copy(each.closest(".snippet"), each));
}

addEventListener("beforeprint", () => {
  for (const each of document.querySelectorAll("details:not(.file)")) each.open = true;
});

await Promise.all([...document.querySelectorAll(".chart")].map(draw));
const meshes = read("meshes");
for (const each of document.querySelectorAll("[data-mesh]")) {
  startMesh(each, meshes[Number(each.dataset.mesh)]);
}
document.querySelectorAll(".timeline").forEach(startTimeline);
document.documentElement.dataset.ready = "";
